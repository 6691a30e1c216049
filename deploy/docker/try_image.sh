#!/usr/bin/env bash
# Builds the CPU image on a base made from Debian's packages and trains in it through a killed worker; five minutes.
#
#   deploy/docker/try_image.sh [FOLDER]        FOLDER keeps the base and the wheels for the next time
#
# For machines without a registry of images. Needs root, buildah, mmdebstrap and a python3 of the base's version (3.11),
# whose pip fetches the wheels: inside the image pip has no index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(realpath -m "${1:-build/image}")
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
for program in buildah mmdebstrap python3; do
    command -v "$program" >/dev/null || { echo "try_image.sh: $program is missing" >&2; exit 1; }
done
python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "try_image.sh: needs python3 3.11, the base'"'"'s")'
mkdir -p "$folder/wheels"

[ -e "$folder/base.tar" ] || mmdebstrap --quiet --variant=minbase \
    --include=python3,python3-pip,python3-dev,ca-certificates,passwd bookworm "$folder/base.tar"
ray=$(sed -n 's/^ARG RAY=//p' deploy/docker/Dockerfile)
python3 -m pip download --quiet --dest "$folder/wheels" --constraint deploy/docker/constraints.txt \
    "torch>=2.11,<2.14" "ray==$ray" . "setuptools>=77" wheel
rm -f "$folder"/wheels/elastic_ring-*

base=$(buildah from scratch)
buildah add --quiet "$base" "$folder/base.tar" / >/dev/null
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    --env PIP_NO_INDEX=1 --env PIP_FIND_LINKS=/wheels --env PIP_BREAK_SYSTEM_PACKAGES=1 "$base"
buildah run "$base" -- ln -s python3 /usr/bin/python
buildah commit --quiet --rm "$base" elastic-ring-base >/dev/null
buildah bud --quiet --file deploy/docker/Dockerfile --build-arg BASE=localhost/elastic-ring-base \
    --volume "$folder/wheels:/wheels:ro" --tag elastic-ring:try . >/dev/null

trained=$(buildah from elastic-ring:try)
trap 'buildah rm "$trained" >/dev/null; buildah rmi --force elastic-ring:try elastic-ring-base >/dev/null' EXIT
buildah run "$trained" -- sh -ec '
    test "$(id -u)" = 1000
    cd /home/ray
    elastic-ring train --preset laptop --steps 8 --dp 2 --cp 1 --spares 1 \
        --faults "kill@step=3,phase=backward,rank=1" --run-name in-image --run-dir /shared/in-image
    grep -q "\"exact\": true" /shared/in-image/summary.json'
echo "the image builds, runs as user 1000, and a run in it went on exactly through a killed worker"
