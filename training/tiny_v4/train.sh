#!/bin/sh
# tiny-v4 from nothing: corpus, training, figures, comparison with transformers.
#   train.sh WORK_DIR FOLDER [options of train.py]
# The corpus is made only where WORK_DIR has none, so it can come from another machine than the GPU's.
set -eu
here=$(dirname "$0") work=$1 folder=$2 python=${PYTHON:-python3}
shift 2
[ -e "$work/tokens.npz" ] || "$python" "$here/corpus.py" "$work"
"$python" "$here/train.py" "$work" "$folder" "$@"
"$python" "$here/measure.py" "$work" "$folder"
"$python" "$here/check.py" "$folder"
