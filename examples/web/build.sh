#!/bin/sh
# Builds chat.wasm in a folder that `monoplan export --isa generic` wrote: build.sh FOLDER
# Needs clang with the target wasm32, wasm-ld, and WASI's C library (Debian: clang lld wasi-libc libclang-rt-dev-wasm32).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$1"
flags=$(sed -n 's/^PLAN_FLAGS = //p' Makefile)
# shellcheck disable=SC2086  # flags are words
"${CLANG:-clang}" --target=wasm32-wasi --sysroot="${WASI_SYSROOT:-/usr}" -mexec-model=reactor -msimd128 -O3 $flags \
    -std=gnu11 -I. -Wl,-z,stack-size=1048576 -o chat.wasm "$here/web.c" model.c -lm
cp "$here/index.html" "$here/demo.js" .
