#!/bin/sh
# The corpus of the small scale: kernel sources and manuals from Debian packages, about 1.2 GB of text with thousands of
# documents beyond 64k characters, as data/small_text/*.jsonl. Needs apt-get and dpkg-deb, no root.
set -eu
cd "$(dirname "$0")/../../.."
work=data/small_text/packages
mkdir -p "$work"
cd "$work"
for package in linux-source-6.1 linux-doc-6.1 cppreference-doc-en-html python3.11-doc python-sympy-doc racket-doc \
    erlang-doc perl-doc postgresql-doc-15 emacs-el; do
    test -d "$package" && continue
    apt-get download "$package"
    dpkg-deb -x "$package"_*.deb "$package.part"
    find "$package.part" -name '*.tar.xz' -execdir tar -xJf {} ';' -delete
    mv "$package.part" "$package"
done
cd - > /dev/null
python recipes/scales/small/gather_text.py "$work" data/small_text
