# usage: build.sh ROOT OUT [flags]: one library a variant
ROOT=$1 OUT=$2; shift 2
for v in ${VARIANTS:-P192x2 P192x1 P128x2 P256x2}; do
  extra=; [ $v = P192x2 ] && extra="-DHALF -DMORE"
  echo "nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Xcompiler -fPIC,-fvisibility=hidden -I$ROOT/csrc -I$ROOT/cuda -DONLY=$v $extra $* -shared -cudart static -o $OUT/$v.so $(dirname $0)/exp.cu"
done | xargs -P ${JOBS:-2} -I{} sh -c "{}"
