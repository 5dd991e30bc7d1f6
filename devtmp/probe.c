#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <omp.h>
#include <immintrin.h>
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+1e-9*t.tv_nsec;}
int main(int c,char**v){ size_t n=(size_t)1<<30; char*p=aligned_alloc(4096,n); memset(p,1,n); int T=atoi(v[1]);
 double best=1e9,all[9]; for(int r=0;r<9;r++){ double t=now(); long s=0;
 #pragma omp parallel num_threads(T) reduction(+:s)
 { size_t per=n/T/4; char*q=p+omp_get_thread_num()*(n/T); __m512i a=_mm512_setzero_si512(),b=a,d=a,e=a;
   for(size_t i=0;i<per;i+=64){ a=_mm512_add_epi32(a,_mm512_load_si512(q+i)); b=_mm512_add_epi32(b,_mm512_load_si512(q+per+i)); d=_mm512_add_epi32(d,_mm512_load_si512(q+2*per+i)); e=_mm512_add_epi32(e,_mm512_load_si512(q+3*per+i)); }
   s+=_mm512_reduce_add_epi32(a)+_mm512_reduce_add_epi32(b)+_mm512_reduce_add_epi32(d)+_mm512_reduce_add_epi32(e);} 
 t=now()-t; all[r]=t; if(t<best)best=t; if(s==12345)printf("x"); }
 printf("read %d threads: %.1f GB/s\n",T,n/best/1e9); }
