#!/usr/bin/env bash
# The shared libraries that Mooncake's wheel expects from the system. Installs what is
# missing where that can be done without asking; says what to install where it can't.
set -euo pipefail

declare -A package=([libibverbs.so.1]=libibverbs1 [libnuma.so.1]=libnuma1 [libcurl.so.4]=libcurl4)
missing=()
known=$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null || true)
for library in "${!package[@]}"; do
  grep -q "$library" <<<"$known" || missing+=("${package[$library]}")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "system libraries missing for Mooncake: install the equivalents of ${missing[*]} with your package manager" >&2
  exit 1
fi
if [ "$(id -u)" = 0 ]; then
  root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  root=(sudo -n)
else
  echo "system libraries missing for Mooncake; as root: apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${root[@]}" apt-get update -qq
"${root[@]}" apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
