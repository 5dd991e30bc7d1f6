import numpy as np, time, sys, os
import monoplan as mp
from monoplan.models import LlamaConfig, LlamaForCausalLM
shape,dtype=sys.argv[1],sys.argv[2]
S={"1b":dict(vocab_size=128256,hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,num_attention_heads=32,num_key_value_heads=8,head_dim=64,tie_word_embeddings=True,rope_theta=500000.0),
   "135m":dict(vocab_size=49152,hidden_size=576,intermediate_size=1536,num_hidden_layers=30,num_attention_heads=9,num_key_value_heads=3,tie_word_embeddings=True)}[shape]
t=time.time(); cfg=LlamaConfig(max_position_embeddings=4096,attention_bias=False,dtype=dtype,**S)
m=LlamaForCausalLM.from_config(cfg,seed=0); print("init %.1f"%(time.time()-t)); t=time.time()
nbytes=sum(p.numpy().nbytes for p in m.parameters())
llm=mp.compile(m); llm.prepare(); print("compile %.1f s"%(time.time()-t), llm.stats.milliseconds)
c=llm.new_cache(1,1024); ids=np.random.default_rng(0).integers(0,cfg.vocab_size,(1,512))
pre=[]; dec=[]
for rep in range(3):
    c.reset(); t=time.perf_counter(); llm(ids,past_key_values=c); pre.append(time.perf_counter()-t)
    c.reset(); llm(ids[:,:128],past_key_values=c)
    for _ in range(15):
        t=time.perf_counter(); llm(ids[:,:1],past_key_values=c); dec.append(time.perf_counter()-t)
p,d=np.median(pre),np.median(dec)
print("%s %s threads %s: prefill512 %.3f s = %.0f tok/s; decode %.2f ms = %.1f tok/s; weights %.0f MB -> %.1f GB/s"%(shape,dtype,os.environ.get("MONOPLAN_NUM_THREADS"),p,512/p,d*1e3,1/d,nbytes/1e6,nbytes/d/1e9))
