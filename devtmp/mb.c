#include "mp_plan.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#ifndef R
#define R 4
#endif
#ifndef K
#define K 576
#endif
#ifndef UN
#define UN 1
#endif
enum { PANEL = 16, V = PANEL/MP_LANES };
__attribute__((noinline)) static void tile_f32(const float *xt, const float *w, float *tile){
 mp_vec acc[R*V];
 MP_UNROLL(64) for(int i=0;i<R*V;++i) acc[i]=mp_splat(0);
 MP_UNROLL(UN)
 for(int64_t i=0;i<K;++i){ mp_vec wide[V];
  MP_UNROLL(64) for(int j=0;j<V;++j) wide[j]=mp_vload_f32(w+i*PANEL+j*MP_LANES);
  MP_UNROLL(16) for(int r=0;r<R;++r){ const mp_vec one=mp_splat(xt[i*R+r]); MP_UNROLL(64) for(int j=0;j<V;++j) acc[r*V+j]+=one*wide[j]; } }
 MP_UNROLL(64) for(int r=0;r<R*V;++r) mp_vstore(tile+r*MP_LANES,acc[r]);
}
typedef uint32_t vu __attribute__((vector_size(4*MP_LANES),aligned(4),may_alias));
__attribute__((noinline)) static void tile_b16(const float *xt, const uint16_t *w, float *tile){
 mp_vec acc[R*V];
 MP_UNROLL(64) for(int i=0;i<R*V;++i) acc[i]=mp_splat(0);
 MP_UNROLL(UN)
 for(int64_t i=0;i<K;++i){ mp_vec wide[V];
  MP_UNROLL(64) for(int j=0;j<V/2;++j){ vu u=*(const vu*)(w+i*PANEL+j*2*MP_LANES); wide[j]=(mp_vec)(u<<16); wide[j+V/2]=(mp_vec)(u&0xffff0000u);} 
  MP_UNROLL(16) for(int r=0;r<R;++r){ const mp_vec one=mp_splat(xt[i*R+r]); MP_UNROLL(64) for(int j=0;j<V;++j) acc[r*V+j]+=one*wide[j]; } }
 MP_UNROLL(64) for(int r=0;r<R*V;++r) mp_vstore(tile+r*MP_LANES,acc[r]);
}
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+1e-9*t.tv_nsec;}
int main(){ float *xt=aligned_alloc(64,K*16*4),*w=aligned_alloc(64,K*16*4*8),tile[1024]; uint16_t*wb=(uint16_t*)w; for(int i=0;i<K*16;i++)xt[i]=1e-3f; for(int i=0;i<K*16*8;i++)w[i]=1e-3f;
 for(int which=0;which<2;which++){ double best=1e9; for(int rep=0;rep<15;rep++){ double t=now(); for(int n=0;n<200;n++){ if(which) tile_b16(xt,wb+(n&7)*K*16,tile); else tile_f32(xt,w+(n&7)*K*16,tile);} t=now()-t; if(t<best)best=t;} printf("R=%d K=%d %s %.1f GFLOP/s\n",R,K,which?"bf16":"f32",200.0*2*R*16*K/best/1e9);} return tile[3]==7; }
