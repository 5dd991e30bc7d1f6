/* GenerationStep: one plan, written by monoplan test for cuda (sm_90).
 * 21 kernels; symbols: batch, seq, capacity, hist
 *
 * Steps, each with the launches it may become; the number of rows decides.
 * 0: %minimum = pointwise(%arange, %reshape, %reshape_2) {expr="minimum(add(cast(x1, dtype=i64), x0), sub(add(x1,
 *     x2), 1))"} : i64[batch, seq]  (monoplan/models/llama.py:0 in model)
 *     pointwise_0<<<(((n_batch * n_seq + 255) / 256)), 256>>>
 * 1: %embedding = embedding(%input_ids, %model.embed_tokens.weight) : f32[batch, seq, 32]
 *     (monoplan/models/llama.py:0 in model.embed_tokens)
 *     embedding_1<<<(((n_batch * n_seq * 32 + 255) / 256)), 256>>>
 * 2: %rope, %kv_update, %kv_update_1 = qkv_rope_cache(%embedding, %concat, %minimum, %model.rotary_emb.sin,
 *     %model.rotary_emb.cos, %past_key_values.k.0, %past_key_values.v.0, %past_key_values.lengths, %num_valid, _,
 *     %model.layers.0.input_layernorm.weight) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms", eps=1e-06,
 *     qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
 *     (monoplan/models/llama.py:0 in model.layers.0.self_attn.q_proj)
 *     n_batch * n_seq = 1: qkv_rope_cache_2_row<<<(32), 512>>>
 *     n_batch * n_seq >= 2: qkv_rope_cache_2_prepare<<<(n_batch * n_seq), 256>>>, library product n_batch * n_seq
 *     x 64 x 32, qkv_rope_cache_2_finish<<<(n_batch * n_seq), 256>>>
 * 3: %transpose_1 = attention(%rope, %kv_update, %kv_update_1, _, %past_key_values.lengths) {causal=True,
 *     scale=0.3535533905932738, softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 8]
 *     (monoplan/models/llama.py:0 in model.layers.0.self_attn)
 *     attention_3<<<(n_batch * n_seq * 4), 256>>>
 * 4: %add_2 = fused_linear(%reshape_6, %model.layers.0.self_attn.o_proj.weight, _, _, _, %embedding) {norm="none",
 *     eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]  (monoplan/models/llama.py:0 in
 *     model.layers.0)
 *     n_batch * n_seq = 1: fused_linear_4_row<<<(16), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 32 x 32
 * 5: %mul = fused_linear(%add_2, %concat_1, _, %model.layers.0.post_attention_layernorm.weight) {norm="rms",
 *     eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, seq, 48]  (monoplan/models/llama.py:0 in
 *     model.layers.0.mlp)
 *     n_batch * n_seq = 1: fused_linear_5_row<<<(48), 256>>>
 *     n_batch * n_seq >= 2: fused_linear_5_prepare<<<(n_batch * n_seq), 256>>>, library product n_batch * n_seq x
 *     96 x 32, fused_linear_5_finish<<<(n_batch * n_seq), 256>>>
 * 6: %add_3 = fused_linear(%mul, %model.layers.0.mlp.down_proj.weight, _, _, _, %add_2) {norm="none", eps=0.0,
 *     gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]  (monoplan/models/llama.py:0 in model.layers.0)
 *     n_batch * n_seq = 1: fused_linear_6_row<<<(16), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 32 x 48
 * 7: %rope_2, %kv_update_2, %kv_update_3 = qkv_rope_cache(%add_3, %concat_2, %minimum, %model.rotary_emb.sin,
 *     %model.rotary_emb.cos, %past_key_values.k.1, %past_key_values.v.1, %past_key_values.lengths, %num_valid, _,
 *     %model.layers.1.input_layernorm.weight) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms", eps=1e-06,
 *     qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
 *     (monoplan/models/llama.py:0 in model.layers.1.self_attn.q_proj)
 *     n_batch * n_seq = 1: qkv_rope_cache_2_row<<<(32), 512>>>
 *     n_batch * n_seq >= 2: qkv_rope_cache_2_prepare<<<(n_batch * n_seq), 256>>>, library product n_batch * n_seq
 *     x 64 x 32, qkv_rope_cache_2_finish<<<(n_batch * n_seq), 256>>>
 * 8: %transpose_3 = attention(%rope_2, %kv_update_2, %kv_update_3, _, %past_key_values.lengths) {causal=True,
 *     scale=0.3535533905932738, softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 8]
 *     (monoplan/models/llama.py:0 in model.layers.1.self_attn)
 *     attention_3<<<(n_batch * n_seq * 4), 256>>>
 * 9: %add_4 = fused_linear(%reshape_10, %model.layers.1.self_attn.o_proj.weight, _, _, _, %add_3) {norm="none",
 *     eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]  (monoplan/models/llama.py:0 in
 *     model.layers.1)
 *     n_batch * n_seq = 1: fused_linear_4_row<<<(16), 256>>>
 *     n_batch * n_seq >= 2: library product n_batch * n_seq x 32 x 32
 * 10: %add_6 = add(%past_key_values.lengths, %num_valid) : i32[batch]  (monoplan/models/llama.py:0 in model)
 *     add_10<<<(((n_batch + 255) / 256)), 256>>>
 * 11: %sub_1 = pointwise(%num_valid) {expr="sub(x0, 1)"} : i32[batch]  (monoplan/models/llama.py:0 in model)
 *     pointwise_11<<<(((n_batch + 255) / 256)), 256>>>
 * 12: %select_rows_1 = select_rows(%add_4, %sub_1) : f32[batch, 1, 32]  (monoplan/models/llama.py:0 in model)
 *     select_rows_12<<<(((n_batch * 32 + 255) / 256)), 256>>>
 * 13: %swiglu = fused_linear(%select_rows_1, %concat_3, _, %model.layers.1.post_attention_layernorm.weight)
 *     {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, 1, 48]  (monoplan/models/llama.py:0
 *     in model.layers.1.mlp)
 *     n_batch = 1: fused_linear_13_row<<<(48), 256>>>
 *     n_batch >= 2: fused_linear_13_prepare<<<(n_batch), 256>>>, library product n_batch x 96 x 32,
 *     fused_linear_13_finish<<<(n_batch), 256>>>
 * 14: %add_8 = fused_linear(%swiglu, %model.layers.1.mlp.down_proj.weight, _, _, _, %select_rows_1) {norm="none",
 *     eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, 1, 32]  (monoplan/models/llama.py:0 in
 *     model.layers.1)
 *     n_batch = 1: fused_linear_14_row<<<(16), 256>>>
 *     n_batch >= 2: library product n_batch x 32 x 48
 * 15: %linear_14 = fused_linear(%add_8, %lm_head.weight, _, %model.norm.weight) {norm="rms", eps=1e-06,
 *     gated=False, expr="x0"} : f32[batch, 1, 50]  (monoplan/models/llama.py:0 in lm_head)
 *     n_batch = 1: fused_linear_15_row<<<(25), 256>>>
 *     n_batch >= 2: fused_linear_13_prepare<<<(n_batch), 256>>>, library product n_batch x 50 x 32
 * 16: %repetition_penalty = repetition_penalty(%reshape_11, %history, %history_count, %penalty) : f32[batch, 50]
 *     (monoplan/models/generate/generation.py:0)
 *     repetition_penalty_16<<<(((n_batch * 50 + 255) / 256)), 256>>>
 * 17: %random_sample = random_sample(%repetition_penalty, %random_val, %top_p, %top_k, %temperature, %min_p) :
 *     i64[batch]  (monoplan/models/generate/generation.py:0)
 *     random_sample_17<<<(n_batch), 1024>>>
 * 18: %max = max(%reshape_11) {axes=(-1,), keepdims=True} : f32[batch, 1]
 *     (monoplan/models/generate/generation.py:0)
 *     max_18<<<(((n_batch * 32 + 255) / 256)), 256>>>
 * 19: %take_along = take_along(%reshape_11, %reshape_12) {axis=-1} : f32[batch, 1]
 *     (monoplan/models/generate/generation.py:0)
 *     take_along_19<<<(((n_batch + 255) / 256)), 256>>>
 * 20: %sub_3 = fused_reduce(%reshape_11, %max, %take_along, %max) {inputs=2, reduce="sum", axes=(-1,),
 *     keepdims=True, pre="exp(sub(x0, x1))", post="sub(x1, add(log(x0), x2))"} : f32[batch, 1]
 *     (monoplan/models/generate/generation.py:0)
 *     fused_reduce_20<<<(((n_batch * 32 + 255) / 256)), 256>>> */

/* %minimum = pointwise(%arange, %reshape, %reshape_2) {expr="minimum(add(cast(x1, dtype=i64), x0), sub(add(x1,
 *     x2), 1))"} : i64[batch, seq]
 * monoplan/models/llama.py:0 in model */
extern "C" __global__ void __launch_bounds__(256)
pointwise_0(const int32_t *x1, const int32_t *x2, int64_t *y, const int64_t n_batch, const int64_t n_seq,
    mp_error *error, const int64_t step)
{
    mp_wait();
    const int64_t outer = n_batch, inner = n_seq;
    const int64_t flat = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (flat >= outer * inner) return;
    const int64_t o MP_UNUSED = flat / inner, i MP_UNUSED = flat % inner;
    const int64_t o0 MP_UNUSED = o;
    y[o0 * n_seq + i] = mp_minimum_i64(((int64_t)(x1[o0]) + (int64_t)(i)), (int64_t)(((x1[o0] + x2[o0]) - 1)));
}

/* %embedding = embedding(%input_ids, %model.embed_tokens.weight) : f32[batch, seq, 32]
 * monoplan/models/llama.py:0 in model.embed_tokens */
extern "C" __global__ void __launch_bounds__(256)
embedding_1(const float *x, const int64_t *index, float *y, const int64_t n_batch, const int64_t n_seq,
    mp_error *error, const int64_t step)
{
    mp_wait();
    const int64_t outer = n_batch * n_seq, inner = 32, limit = 50;
    const int64_t flat = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (flat >= outer * inner) return;
    const int64_t o = flat / inner, i MP_UNUSED = flat % inner;
    const int64_t o0 MP_UNUSED = o / (n_seq);
    const int64_t o1 MP_UNUSED = o % (n_seq);
    int64_t at = (int64_t)index[o0 * n_seq + o1];
    if (at < 0 || at >= limit) {
        if (i == 0) mp_fail(error, MP_INDEX, step, o, at, limit);
        if (limit == 0) return;
        at = 0;
    }
    const int64_t i0 MP_UNUSED = i;
    y[o0 * n_seq * 32 + o1 * 32 + i0] = x[at * 32 + i0];
}

/* %rope, %kv_update, %kv_update_1 = qkv_rope_cache(%embedding, %concat, %minimum, %model.rotary_emb.sin,
 *     %model.rotary_emb.cos, %past_key_values.k.0, %past_key_values.v.0, %past_key_values.lengths, %num_valid, _,
 *     %model.layers.0.input_layernorm.weight) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms", eps=1e-06,
 *     qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
 * monoplan/models/llama.py:0 in model.layers.0.self_attn.q_proj */
extern "C" __global__ void __launch_bounds__(512, 2)
qkv_rope_cache_2_row(const float *x, const float *w, const float *norm_weight, const int64_t *positions,
    const float *sin, const float *cos, const int32_t *lengths, const int32_t *valid, float *k_cache,
    float *v_cache, float *y, const int64_t n_batch, const int64_t n_capacity, const int64_t n_seq,
    mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 32, N = 64, RMS = 1, GAMMA = MP_GAMMA_CONSTANT };
        enum { GRID = 32, WARPS = 16, SLICES = 1, BATCH = 4 };
        enum { RING = 3, EARLY = 3, GENTLE = 1, LATE = 0, AHEAD = 1 };
    };
    enum { N = S::N };
    /* One pair of dimensions of a head, which rotate together; q goes to y, k and v to row `at` of their caches. */
    struct Heads {
        enum { DIM = 8, HEADS = 4, KV = 2, HALF = 4, INTERLEAVED = 0 };
    };
    enum { DIM = Heads::DIM, HEADS = Heads::HEADS, KV = Heads::KV, HALF = Heads::HALF };
    const uint32_t seq = (uint32_t)(n_seq);
    struct Extra { float sine, cosine; int64_t start, given; int failed; };
    auto ahead = [&](const int64_t row, const int64_t pair) {
        Extra extra = {0.0f, 1.0f, 0, 0, 0};
        const int64_t head = pair / (DIM / 2), i = pair % (DIM / 2);
        const int64_t b0 MP_UNUSED = (uint32_t)row / seq, s0 MP_UNUSED = (uint32_t)row % seq;
        if (head < HEADS + KV && i < HALF) {
            int64_t angle = (int64_t)positions[b0 * n_seq + s0];
            if (angle < 0 || angle >= 64) {
                if (pair == 0) mp_fail(error, MP_POSITION, step, row, angle, 64);
                angle = 0;
            }
            extra.sine = sin[angle * 4 + i];
            extra.cosine = cos[angle * 4 + i];
        }
        if (head >= HEADS) extra.start = (int64_t)lengths[b0], extra.given = (int64_t)valid[b0];
        return extra;
    };
    /* After an error of an earlier step the caller keeps what it had. Stores wait for it: it is read early. */
    auto fresh = [&](Extra &extra) { extra.failed = error->code; };
    auto fetch MP_UNUSED = [&](const int64_t row, const int64_t pair) {
        Extra extra = ahead(row, pair);
        if (error->code) extra.given = 0;
        return extra;
    };
    auto turned = [&](const Extra &extra, float &u, float &v) {
        const float first = u, second = v;
        u = first * extra.cosine - second * extra.sine, v = first * extra.sine + second * extra.cosine;
    };
    /* The row of the caches of a new token, or -1: it is not kept. All rows of a sequence are, or none. */
    auto place = [&](const Extra &extra, const int64_t row, const bool reports) {
        const int64_t b0 MP_UNUSED = (uint32_t)row / seq, s0 MP_UNUSED = (uint32_t)row % seq;
        if (extra.given < 0 || extra.given > n_seq) {
            if (reports) mp_fail(error, MP_COUNT, step, b0, extra.given, n_seq);
            return (int64_t)-1;
        }
        if (extra.start < 0 || extra.start > n_capacity - extra.given) {
            if (reports) mp_fail(error, MP_CACHE_FULL, step, b0, extra.start + extra.given, n_capacity);
            return (int64_t)-1;
        }
        return s0 >= extra.given || extra.failed ? -1 : extra.start + s0;
    };
    auto finish = [&](const Extra &extra, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t head = pair / (DIM / 2), i = pair % (DIM / 2);
        const int64_t b0 MP_UNUSED = (uint32_t)row / seq, s0 MP_UNUSED = (uint32_t)row % seq;
        const mp_dims dims = mp_pair_dims<Heads>(head, i);
        float a = first, b = second;
        turned(extra, a, b);
        if (head < HEADS) {
            y[b0 * n_seq * 32 + s0 * 32 + head * 8 + dims.first] = a;
            y[b0 * n_seq * 32 + s0 * 32 + head * 8 + dims.second] = b;
            return;
        }
        const int64_t kv MP_UNUSED = head < HEADS + KV ? head - HEADS : head - HEADS - KV;
        const int64_t at = place(extra, row, head == HEADS && i == 0);
        if (at < 0) return;
        if (head < HEADS + KV) {
            k_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8 + dims.first] = a;
            k_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8 + dims.second] = b;
        } else {
            v_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8 + dims.first] = a;
            v_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8 + dims.second] = b;
        }
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (norm_weight + 0), 9.999999974752427e-07f, ahead, fresh, finish);
}

/* %rope, %kv_update, %kv_update_1 = qkv_rope_cache(%embedding, %concat, %minimum, %model.rotary_emb.sin,
 *     %model.rotary_emb.cos, %past_key_values.k.0, %past_key_values.v.0, %past_key_values.lengths, %num_valid, _,
 *     %model.layers.0.input_layernorm.weight) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms", eps=1e-06,
 *     qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
 * monoplan/models/llama.py:0 in model.layers.0.self_attn.q_proj */
extern "C" __global__ void __launch_bounds__(256)
qkv_rope_cache_2_prepare(const float *x, const float *norm_weight, float *xs, const int64_t n_batch,
    const int64_t n_capacity, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 32, RMS = 1 };
    const int64_t row = blockIdx.x;
    mp_release();
    auto value = [&](const int64_t i) { return x[row * 32 + i]; };
    auto rounded = [&](const int64_t i,
        const float scale MP_UNUSED) { return (x[row * 32 + i] * scale) * norm_weight[i]; };
    mp_linear_prepare_each<K, RMS>(xs + row * K, 9.999999974752427e-07f, value, rounded);
}

/* %rope, %kv_update, %kv_update_1 = qkv_rope_cache(%embedding, %concat, %minimum, %model.rotary_emb.sin,
 *     %model.rotary_emb.cos, %past_key_values.k.0, %past_key_values.v.0, %past_key_values.lengths, %num_valid, _,
 *     %model.layers.0.input_layernorm.weight) {heads=4, kv_heads=2, algo="gpt_neox", norm="rms", eps=1e-06,
 *     qk_eps=0.0} : f32[batch, seq, 4, 8], f32[batch, 2, capacity, 8], f32[batch, 2, capacity, 8]
 * monoplan/models/llama.py:0 in model.layers.0.self_attn.q_proj */
extern "C" __global__ void __launch_bounds__(256)
qkv_rope_cache_2_finish(const int64_t *positions, const float *sin, const float *cos, const int32_t *lengths,
    const int32_t *valid, float *k_cache, float *v_cache, float *y, const float *sums, const int64_t splits,
    const int64_t n_batch, const int64_t n_capacity, const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { N = 64 };
    const int64_t rows MP_UNUSED = n_batch * n_seq;
    mp_release();
    mp_wait();
    /* One pair of dimensions of a head, which rotate together; q goes to y, k and v to row `at` of their caches. */
    struct Heads {
        enum { DIM = 8, HEADS = 4, KV = 2, HALF = 4, INTERLEAVED = 0 };
    };
    enum { DIM = Heads::DIM, HEADS = Heads::HEADS, KV = Heads::KV, HALF = Heads::HALF };
    const uint32_t seq = (uint32_t)(n_seq);
    struct Extra { float sine, cosine; int64_t start, given; int failed; };
    auto ahead = [&](const int64_t row, const int64_t pair) {
        Extra extra = {0.0f, 1.0f, 0, 0, 0};
        const int64_t head = pair / (DIM / 2), i = pair % (DIM / 2);
        const int64_t b0 MP_UNUSED = (uint32_t)row / seq, s0 MP_UNUSED = (uint32_t)row % seq;
        if (head < HEADS + KV && i < HALF) {
            int64_t angle = (int64_t)positions[b0 * n_seq + s0];
            if (angle < 0 || angle >= 64) {
                if (pair == 0) mp_fail(error, MP_POSITION, step, row, angle, 64);
                angle = 0;
            }
            extra.sine = sin[angle * 4 + i];
            extra.cosine = cos[angle * 4 + i];
        }
        if (head >= HEADS) extra.start = (int64_t)lengths[b0], extra.given = (int64_t)valid[b0];
        return extra;
    };
    /* After an error of an earlier step the caller keeps what it had. Stores wait for it: it is read early. */
    auto fresh = [&](Extra &extra) { extra.failed = error->code; };
    auto fetch MP_UNUSED = [&](const int64_t row, const int64_t pair) {
        Extra extra = ahead(row, pair);
        if (error->code) extra.given = 0;
        return extra;
    };
    auto turned = [&](const Extra &extra, float &u, float &v) {
        const float first = u, second = v;
        u = first * extra.cosine - second * extra.sine, v = first * extra.sine + second * extra.cosine;
    };
    /* The row of the caches of a new token, or -1: it is not kept. All rows of a sequence are, or none. */
    auto place = [&](const Extra &extra, const int64_t row, const bool reports) {
        const int64_t b0 MP_UNUSED = (uint32_t)row / seq, s0 MP_UNUSED = (uint32_t)row % seq;
        if (extra.given < 0 || extra.given > n_seq) {
            if (reports) mp_fail(error, MP_COUNT, step, b0, extra.given, n_seq);
            return (int64_t)-1;
        }
        if (extra.start < 0 || extra.start > n_capacity - extra.given) {
            if (reports) mp_fail(error, MP_CACHE_FULL, step, b0, extra.start + extra.given, n_capacity);
            return (int64_t)-1;
        }
        return s0 >= extra.given || extra.failed ? -1 : extra.start + s0;
    };
    auto finish = [&](const Extra &extra, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t head = pair / (DIM / 2), i = pair % (DIM / 2);
        const int64_t b0 MP_UNUSED = (uint32_t)row / seq, s0 MP_UNUSED = (uint32_t)row % seq;
        const mp_dims dims = mp_pair_dims<Heads>(head, i);
        float a = first, b = second;
        turned(extra, a, b);
        if (head < HEADS) {
            y[b0 * n_seq * 32 + s0 * 32 + head * 8 + dims.first] = a;
            y[b0 * n_seq * 32 + s0 * 32 + head * 8 + dims.second] = b;
            return;
        }
        const int64_t kv MP_UNUSED = head < HEADS + KV ? head - HEADS : head - HEADS - KV;
        const int64_t at = place(extra, row, head == HEADS && i == 0);
        if (at < 0) return;
        if (head < HEADS + KV) {
            k_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8 + dims.first] = a;
            k_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8 + dims.second] = b;
        } else {
            v_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8 + dims.first] = a;
            v_cache[b0 * n_capacity * 16 + kv * n_capacity * 8 + at * 8 + dims.second] = b;
        }
    };
    mp_finish_pairs<N, 1>(sums, splits, rows, fetch, finish);
}

/* %transpose_1 = attention(%rope, %kv_update, %kv_update_1, _, %past_key_values.lengths) {causal=True,
 *     scale=0.3535533905932738, softcap=None, window=None, layout="bshd"} : f32[batch, seq, 4, 8]
 * monoplan/models/llama.py:0 in model.layers.0.self_attn */
extern "C" __global__ void __launch_bounds__(256)
attention_3(const float *q, const float *k, const float *v, const int32_t *past, float *y, const int64_t n_batch,
    const int64_t n_capacity, const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { THREADS = 256, HEADS = 4, GROUP = 2 };
        enum { DIM = 8, VALUE = 8 };
    };
    typedef float real;
    mp_wait();
    const int64_t queries = n_seq, keys = n_capacity;
    const int64_t h = blockIdx.x % S::HEADS, b MP_UNUSED = blockIdx.x / S::HEADS / queries,
        g MP_UNUSED = h / S::GROUP;
    const int64_t s0 = blockIdx.x / S::HEADS % queries, before = (int64_t)past[b], position MP_UNUSED = before + s0;
    const int64_t written = mp_min(keys, before + queries), first = 0, last = mp_min(written, before + s0 + 1);
    auto query = [&](const int64_t i) { return q[b * n_seq * 32 + s0 * 32 + h * 8 + i] * 0.3535533845424652f; };
    auto key_at = [&](const int64_t key,
        const int64_t i) { return k[b * n_capacity * 16 + g * n_capacity * 8 + key * 8 + i]; };
    auto value_at = [&](const int64_t key,
        const int64_t i) { return v[b * n_capacity * 16 + g * n_capacity * 8 + key * 8 + i]; };
    auto visible = [&](const int64_t key) { return key < written && key <= position; };
    auto adjusted = [&](const real dot, const int64_t key MP_UNUSED) { return dot; };
    auto store = [&](const int64_t i, const real value) { y[b * n_seq * 32 + s0 * 32 + h * 8 + i] = value; };
    mp_attention<S, real>(first, last, query, key_at, value_at, visible, adjusted, (float)-INFINITY, store);
}

/* %add_2 = fused_linear(%reshape_6, %model.layers.0.self_attn.o_proj.weight, _, _, _, %embedding) {norm="none",
 *     eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]
 * monoplan/models/llama.py:0 in model.layers.0 */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_4_row(const float *x, const float *w, const float *e0, float *y, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 32, N = 32, RMS = 0, GAMMA = MP_NO_GAMMA };
        enum { GRID = 16, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra { float e0_0, e0_1; };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        const float2 e0_both = mp_load_pair(((e0 + row * 32 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first) + extra.e0_0);
        const float value1 = ((second) + extra.e0_1);
        mp_store_pair((y + row * 32 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (const float *)0, 0.0f, fetch, mp_nothing_more(), finish);
}

/* %mul = fused_linear(%add_2, %concat_1, _, %model.layers.0.post_attention_layernorm.weight) {norm="rms",
 *     eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, seq, 48]
 * monoplan/models/llama.py:0 in model.layers.0.mlp */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_5_row(const float *x, const float *w, const float *norm_weight, float *y, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 32, N = 96, RMS = 1, GAMMA = MP_GAMMA_CONSTANT };
        enum { GRID = 48, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Rows of w alternate: gate, up, gate, up …; a pair makes column n = pair. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair) {
        Extra extra;
        const int64_t n MP_UNUSED = pair;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n = pair;
        const float gate = first, up = second;
        y[row * 48 + n] = mp_swigluf(gate, up);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (norm_weight + 0), 9.999999974752427e-07f, fetch,
        mp_nothing_more(), finish);
}

/* %mul = fused_linear(%add_2, %concat_1, _, %model.layers.0.post_attention_layernorm.weight) {norm="rms",
 *     eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, seq, 48]
 * monoplan/models/llama.py:0 in model.layers.0.mlp */
extern "C" __global__ void __launch_bounds__(256)
fused_linear_5_prepare(const float *x, const float *norm_weight, float *xs, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { K = 32, RMS = 1 };
    const int64_t row = blockIdx.x;
    mp_release();
    auto value = [&](const int64_t i) { return x[row * 32 + i]; };
    auto rounded = [&](const int64_t i,
        const float scale MP_UNUSED) { return (x[row * 32 + i] * scale) * norm_weight[i]; };
    mp_linear_prepare_each<K, RMS>(xs + row * K, 9.999999974752427e-07f, value, rounded);
}

/* %mul = fused_linear(%add_2, %concat_1, _, %model.layers.0.post_attention_layernorm.weight) {norm="rms",
 *     eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, seq, 48]
 * monoplan/models/llama.py:0 in model.layers.0.mlp */
extern "C" __global__ void __launch_bounds__(256)
fused_linear_5_finish(float *y, const float *sums, const int64_t splits, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    enum { N = 96 };
    const int64_t rows MP_UNUSED = n_batch * n_seq;
    mp_release();
    mp_wait();
    /* Rows of w alternate: gate, up, gate, up …; a pair makes column n = pair. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair) {
        Extra extra;
        const int64_t n MP_UNUSED = pair;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n = pair;
        const float gate = first, up = second;
        y[row * 48 + n] = mp_swigluf(gate, up);
    };
    mp_finish_pairs<N, 1>(sums, splits, rows, fetch, finish);
}

/* %add_3 = fused_linear(%mul, %model.layers.0.mlp.down_proj.weight, _, _, _, %add_2) {norm="none", eps=0.0,
 *     gated=False, expr="add(x0, x1)"} : f32[batch, seq, 32]
 * monoplan/models/llama.py:0 in model.layers.0 */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_6_row(const float *x, const float *w, const float *e0, float *y, const int64_t n_batch,
    const int64_t n_seq, mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 48, N = 32, RMS = 0, GAMMA = MP_NO_GAMMA };
        enum { GRID = 16, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra { float e0_0, e0_1; };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        const float2 e0_both = mp_load_pair(((e0 + row * 32 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first) + extra.e0_0);
        const float value1 = ((second) + extra.e0_1);
        mp_store_pair((y + row * 32 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (const float *)0, 0.0f, fetch, mp_nothing_more(), finish);
}

/* %add_6 = add(%past_key_values.lengths, %num_valid) : i32[batch]
 * monoplan/models/llama.py:0 in model */
extern "C" __global__ void __launch_bounds__(256)
add_10(const int32_t *x0, const int32_t *x1, int32_t *y, const int64_t n_batch, mp_error *error, const int64_t step)
{
    mp_wait();
    const int64_t outer = 1, inner = n_batch;
    const int64_t flat = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (flat >= outer * inner) return;
    const int64_t o MP_UNUSED = flat / inner, i MP_UNUSED = flat % inner;
    y[i] = (x0[i] + x1[i]);
}

/* %sub_1 = pointwise(%num_valid) {expr="sub(x0, 1)"} : i32[batch]
 * monoplan/models/llama.py:0 in model */
extern "C" __global__ void __launch_bounds__(256)
pointwise_11(const int32_t *x0, int32_t *y, const int64_t n_batch, mp_error *error, const int64_t step)
{
    mp_wait();
    const int64_t outer = 1, inner = n_batch;
    const int64_t flat = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (flat >= outer * inner) return;
    const int64_t o MP_UNUSED = flat / inner, i MP_UNUSED = flat % inner;
    y[i] = (x0[i] - 1);
}

/* %select_rows_1 = select_rows(%add_4, %sub_1) : f32[batch, 1, 32]
 * monoplan/models/llama.py:0 in model */
extern "C" __global__ void __launch_bounds__(256)
select_rows_12(const float *x, const int32_t *index, float *y, const int64_t n_batch, const int64_t n_seq,
    mp_error *error, const int64_t step)
{
    mp_wait();
    const int64_t outer = n_batch, inner = 32, limit = n_seq;
    const int64_t flat = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (flat >= outer * inner) return;
    const int64_t o = flat / inner, i MP_UNUSED = flat % inner;
    const int64_t o0 MP_UNUSED = o;
    int64_t at = (int64_t)index[o0];
    if (at < 0 || at >= limit) {
        if (i == 0) mp_fail(error, MP_INDEX, step, o, at, limit);
        if (limit == 0) return;
        at = 0;
    }
    const int64_t i0 MP_UNUSED = i;
    y[o0 * 32 + i0] = x[o0 * n_seq * 32 + at * 32 + i0];
}

/* %swiglu = fused_linear(%select_rows_1, %concat_3, _, %model.layers.1.post_attention_layernorm.weight)
 *     {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, 1, 48]
 * monoplan/models/llama.py:0 in model.layers.1.mlp */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_13_row(const float *x, const float *w, const float *norm_weight, float *y, const int64_t n_batch,
    mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 32, N = 96, RMS = 1, GAMMA = MP_GAMMA_CONSTANT };
        enum { GRID = 48, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Rows of w alternate: gate, up, gate, up …; a pair makes column n = pair. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair) {
        Extra extra;
        const int64_t n MP_UNUSED = pair;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n = pair;
        const float gate = first, up = second;
        y[row * 48 + n] = mp_swigluf(gate, up);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (norm_weight + 0), 9.999999974752427e-07f, fetch,
        mp_nothing_more(), finish);
}

/* %swiglu = fused_linear(%select_rows_1, %concat_3, _, %model.layers.1.post_attention_layernorm.weight)
 *     {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, 1, 48]
 * monoplan/models/llama.py:0 in model.layers.1.mlp */
extern "C" __global__ void __launch_bounds__(256)
fused_linear_13_prepare(const float *x, const float *norm_weight, float *xs, const int64_t n_batch,
    mp_error *error, const int64_t step)
{
    enum { K = 32, RMS = 1 };
    const int64_t row = blockIdx.x;
    mp_release();
    auto value = [&](const int64_t i) { return x[row * 32 + i]; };
    auto rounded = [&](const int64_t i,
        const float scale MP_UNUSED) { return (x[row * 32 + i] * scale) * norm_weight[i]; };
    mp_linear_prepare_each<K, RMS>(xs + row * K, 9.999999974752427e-07f, value, rounded);
}

/* %swiglu = fused_linear(%select_rows_1, %concat_3, _, %model.layers.1.post_attention_layernorm.weight)
 *     {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[batch, 1, 48]
 * monoplan/models/llama.py:0 in model.layers.1.mlp */
extern "C" __global__ void __launch_bounds__(256)
fused_linear_13_finish(float *y, const float *sums, const int64_t splits, const int64_t n_batch, mp_error *error,
    const int64_t step)
{
    enum { N = 96 };
    const int64_t rows MP_UNUSED = n_batch;
    mp_release();
    mp_wait();
    /* Rows of w alternate: gate, up, gate, up …; a pair makes column n = pair. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair) {
        Extra extra;
        const int64_t n MP_UNUSED = pair;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n = pair;
        const float gate = first, up = second;
        y[row * 48 + n] = mp_swigluf(gate, up);
    };
    mp_finish_pairs<N, 1>(sums, splits, rows, fetch, finish);
}

/* %add_8 = fused_linear(%swiglu, %model.layers.1.mlp.down_proj.weight, _, _, _, %select_rows_1) {norm="none",
 *     eps=0.0, gated=False, expr="add(x0, x1)"} : f32[batch, 1, 32]
 * monoplan/models/llama.py:0 in model.layers.1 */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_14_row(const float *x, const float *w, const float *e0, float *y, const int64_t n_batch,
    mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 48, N = 32, RMS = 0, GAMMA = MP_NO_GAMMA };
        enum { GRID = 16, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra { float e0_0, e0_1; };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        const float2 e0_both = mp_load_pair(((e0 + row * 32 + n0)));
        extra.e0_0 = e0_both.x, extra.e0_1 = e0_both.y;
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = ((first) + extra.e0_0);
        const float value1 = ((second) + extra.e0_1);
        mp_store_pair((y + row * 32 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (const float *)0, 0.0f, fetch, mp_nothing_more(), finish);
}

/* %linear_14 = fused_linear(%add_8, %lm_head.weight, _, %model.norm.weight) {norm="rms", eps=1e-06, gated=False,
 *     expr="x0"} : f32[batch, 1, 50]
 * monoplan/models/llama.py:0 in lm_head */
extern "C" __global__ void __launch_bounds__(256, 1)
fused_linear_15_row(const float *x, const float *w, const float *norm_weight, float *y, const int64_t n_batch,
    mp_error *error, const int64_t step)
{
    struct S {
        enum { K = 32, N = 50, RMS = 1, GAMMA = MP_GAMMA_CONSTANT };
        enum { GRID = 25, WARPS = 8, SLICES = 1, BATCH = 8 };
        enum { RING = 2, EARLY = 2, GENTLE = 1, LATE = 0, AHEAD = 0 };
    };
    enum { N = S::N };
    /* Columns 2 pair and 2 pair + 1: what the body needs beside the sums is fetched ahead of them. */
    struct Extra {  };
    auto fetch = [&](const int64_t row MP_UNUSED, const int64_t pair MP_UNUSED) {
        Extra extra;
        const int64_t n0 MP_UNUSED = 2 * pair, n1 MP_UNUSED = mp_min(2 * pair + 1, N - 1);
        return extra;
    };
    auto finish = [&](const Extra &extra MP_UNUSED, const int64_t row, const int64_t pair, const float first,
        const float second) {
        const int64_t n0 = 2 * pair, n1 MP_UNUSED = n0 + 1;
        const float value0 = (first);
        const float value1 = (second);
        mp_store_pair((y + row * 50 + n0), value0, value1);
    };
    auto rows_from = [&](const int64_t pair) { return mp_row_run<float, S::K>{w + 2 * pair * S::K}; };
    mp_linear_row<S, float>(rows_from, (x + 0), (norm_weight + 0), 9.999999974752427e-07f, fetch,
        mp_nothing_more(), finish);
}

/* %repetition_penalty = repetition_penalty(%reshape_11, %history, %history_count, %penalty) : f32[batch, 50]
 * monoplan/models/generate/generation.py:0 */
extern "C" __global__ void __launch_bounds__(256)
repetition_penalty_16(const float *x, const int64_t *history, const int32_t *counts, const float *penalty,
    float *y, const int64_t n_batch, const int64_t n_hist, mp_error *error, const int64_t step)
{
    const int64_t rows MP_UNUSED = n_batch, vocabulary = 50;
    mp_wait();
    const int64_t flat = (int64_t)blockIdx.x * 256 + threadIdx.x, i = flat % vocabulary, o0 = flat / vocabulary;
    if (o0 >= rows) return;
    const int64_t seen = mp_min((int64_t)counts[o0], n_hist);
    const float penalty_value = (float)penalty[o0], x0 = x[o0 * 50 + i];
    bool hit = false;
    for (int64_t j = 0; j < seen; ++j) hit = hit || (int64_t)history[o0 * n_hist + j] == i;
    const float v = !hit ? x0 : x0 > 0 ? x0 / penalty_value : x0 * penalty_value;
    y[o0 * 50 + i] = v;
}

/* %random_sample = random_sample(%repetition_penalty, %random_val, %top_p, %top_k, %temperature, %min_p) :
 *     i64[batch]
 * monoplan/models/generate/generation.py:0 */
extern "C" __global__ void __launch_bounds__(1024)
random_sample_17(const float *x, const float *random_val, const float *top_p, const int32_t *top_k,
    const float *temperature, const float *min_p, int64_t *y, int64_t *heap, double *weights,
    const int64_t n_batch, mp_error *error, const int64_t step)
{
    const int64_t rows MP_UNUSED = n_batch, vocabulary = 50;
    mp_wait();
    const int64_t o = blockIdx.x;
    const int64_t o0 MP_UNUSED = o;
    auto logit = [&](const int64_t i) { return (double)x[o0 * 50 + i]; };
    uint64_t *const mass = (uint64_t *)weights + o * vocabulary;
    const int64_t token = mp_sample<1024>(mass, vocabulary, logit, temperature[o0], top_p[o0], min_p[o0],
        (int64_t)top_k[o0], random_val[o0]);
    if (threadIdx.x == 0) {
        y[o0] = token;
    }
}

/* %max = max(%reshape_11) {axes=(-1,), keepdims=True} : f32[batch, 1]
 * monoplan/models/generate/generation.py:0 */
extern "C" __global__ void __launch_bounds__(256)
max_18(const float *x0, float *y, const int64_t n_batch, mp_error *error, const int64_t step)
{
    enum { THREADS = 256, TEAM = 32 };
    __shared__ float found[THREADS];
    __shared__ int64_t place[THREADS]; /* of the element found; -1: none */
    mp_release();
    mp_wait();
    const int64_t outer = n_batch, inner = 50;
    const int64_t o = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / TEAM;
    const int member = threadIdx.x % TEAM;
    float acc = 0;
    int64_t best = -1;
    if (o < outer) {
        const int64_t o0 MP_UNUSED = o;
        MP_UNROLL_BY(4)
        for (int64_t i = member; i < inner; i += TEAM) {
            const int64_t i0 MP_UNUSED = i;
            const float v = x0[o0 * 50 + i0];
            acc = best < 0 ? v : mp_maximum_f32(acc, v);
            best = i;
        }
    }
    found[threadIdx.x] = acc;
    place[threadIdx.x] = best;
    for (int half = TEAM / 2; half > 0; half /= 2) {
        __syncthreads();
        if (member < half && place[threadIdx.x + half] >= 0) {
            const float v = found[threadIdx.x + half];
            const int64_t i = place[threadIdx.x + half];
            acc = found[threadIdx.x];
            best = place[threadIdx.x];
            acc = best < 0 ? v : mp_maximum_f32(acc, v);
            best = i;
            found[threadIdx.x] = acc;
            place[threadIdx.x] = best;
        }
    }
    __syncthreads();
    if (member > 0 || o >= outer) return;
    acc = found[threadIdx.x];
    best = mp_max(place[threadIdx.x], 0);
    const int64_t o0 MP_UNUSED = o;
    y[o0] = (float)(acc);
}

/* %take_along = take_along(%reshape_11, %reshape_12) {axis=-1} : f32[batch, 1]
 * monoplan/models/generate/generation.py:0 */
extern "C" __global__ void __launch_bounds__(256)
take_along_19(const float *x, const int64_t *index, float *y, const int64_t n_batch, mp_error *error,
    const int64_t step)
{
    mp_wait();
    const int64_t outer = n_batch, inner = 1, limit = 50;
    const int64_t flat = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (flat >= outer * inner) return;
    const int64_t o = flat / inner, i MP_UNUSED = flat % inner;
    const int64_t o0 MP_UNUSED = o;
    const int64_t o1 MP_UNUSED = o % (1);
    int64_t at = (int64_t)index[o0 + o1];
    if (at < 0 || at >= limit) {
        if (i == 0) mp_fail(error, MP_INDEX, step, o, at, limit);
        if (limit == 0) return;
        at = 0;
    }
    y[o0 + o1] = x[o0 * 50 + at];
}

/* %sub_3 = fused_reduce(%reshape_11, %max, %take_along, %max) {inputs=2, reduce="sum", axes=(-1,), keepdims=True,
 *     pre="exp(sub(x0, x1))", post="sub(x1, add(log(x0), x2))"} : f32[batch, 1]
 * monoplan/models/generate/generation.py:0 */
extern "C" __global__ void __launch_bounds__(256)
fused_reduce_20(const float *x0, const float *x1, const float *e0, const float *e1, float *y,
    const int64_t n_batch, mp_error *error, const int64_t step)
{
    enum { THREADS = 256, TEAM = 32 };
    __shared__ double found[THREADS];
    __shared__ int64_t place[THREADS]; /* of the element found; -1: none */
    mp_release();
    mp_wait();
    const int64_t outer = n_batch, inner = 50;
    const int64_t o = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / TEAM;
    const int member = threadIdx.x % TEAM;
    double acc = 0;
    int64_t best = -1;
    if (o < outer) {
        const int64_t o0 MP_UNUSED = o;
        MP_UNROLL_BY(4)
        for (int64_t i = member; i < inner; i += TEAM) {
            const int64_t i0 MP_UNUSED = i;
            const float v = mp_expf((x0[o0 * 50 + i0] - x1[o0]));
            acc = (double)(acc + (double)v);
            best = i;
        }
    }
    found[threadIdx.x] = acc;
    place[threadIdx.x] = best;
    for (int half = TEAM / 2; half > 0; half /= 2) {
        __syncthreads();
        if (member < half && place[threadIdx.x + half] >= 0) {
            const double v = found[threadIdx.x + half];
            const int64_t i = place[threadIdx.x + half];
            acc = found[threadIdx.x];
            best = place[threadIdx.x];
            acc = (double)(acc + (double)v);
            best = i;
            found[threadIdx.x] = acc;
            place[threadIdx.x] = best;
        }
    }
    __syncthreads();
    if (member > 0 || o >= outer) return;
    acc = found[threadIdx.x];
    best = mp_max(place[threadIdx.x], 0);
    const int64_t o0 MP_UNUSED = o;
    y[o0] = (e0[o0] - (mp_logf((float)(acc)) + e1[o0]));
}
