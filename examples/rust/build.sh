#!/bin/sh
# Builds main.rs with the plan in a folder that `fast.export` wrote: build.sh FOLDER. Needs rustc and a C compiler.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$1"
make model.o
"${RUSTC:-rustc}" -O -o rust_main "$here/main.rs" -C link-arg=model.o -C link-arg=-lm -C link-arg=-fopenmp
