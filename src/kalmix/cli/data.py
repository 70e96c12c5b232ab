"""`kalmix data`: prepare token shards, and check them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kalmix.errors import ArgumentError
from kalmix.training.shards import DatasetOptions, Manifest, Preparation, Shards
from kalmix.training.shards.manifest import Licences

SHOWN = 4  # sources that are printed
app: typer.Typer = typer.Typer(name="data", help="Prepare token shards to pretrain on.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make typer treat `data` as a group of commands."""


@app.command(name="prepare")
def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            help="File, folder or pattern of text, JSON lines or Parquet, or hf:NAME, a dataset of `datasets`; several "
            "are read in this order."
        ),
    ],
    output: Annotated[str, typer.Option(help="Folder of the shards. An interrupted preparation in it continues.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face name of a tokenizer. Default: a BPE trained on SOURCE.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Largest vocabulary of a trained BPE.")] = Preparation.vocab_size,
    column: Annotated[
        str,
        typer.Option(
            help="Column with the text, in JSON, Parquet and datasets. A dot selects a field of an object: meta.text."
        ),
    ] = Preparation.column,
    bos: Annotated[
        str | None, typer.Option(help="Token that begins each document. Default: the tokenizer's own.")
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="Fraction of the documents to hold out, chosen by a hash of their text.")
    ] = Preparation.held_out,
    licence: Annotated[
        list[str] | None,
        typer.Option(
            help="Licence of all sources, or SOURCE=LICENCE, for the manifest; repeatable. A licence may hold '=' only "
            "in a URL."
        ),
    ] = None,
    config: Annotated[str | None, typer.Option(help="Configuration of hf: datasets.")] = None,
    split: Annotated[str, typer.Option(help="Split of an hf: dataset.")] = "train",
    stream: Annotated[bool, typer.Option("--stream", help="Stream an hf: dataset in place of downloading it.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of an hf: dataset.")] = None,
    data_files: Annotated[
        list[str] | None, typer.Option(help="File of an hf: dataset to read, or a pattern; repeatable.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of an hf: dataset to read.")] = None,
    shard_tokens: Annotated[
        int, typer.Option(help="Number of tokens after which a shard ends.")
    ] = Preparation.shard_tokens,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out documents that cannot be read, and count them.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Number of training tokens at which to stop. Default: the whole source.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes. Default: one a CPU core.")] = None,
) -> None:
    """Tokenise a source into shards: memory-mapped files of tokens with hashes, for pretraining.

    Repeat the command to continue after an interruption; finished shards are kept.
    """
    preparation = Preparation(
        source=tuple(source),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        column=column,
        bos=bos,
        held_out=held_out,
        licences=_licences(licence or (), source),
        dataset=DatasetOptions(config, split, stream, revision, tuple(data_files or ()), data_dir),
        shard_tokens=shard_tokens,
        skip_damaged=skip_damaged,
        max_tokens=max_tokens,
    )
    if not output.strip():
        raise ArgumentError("output", got="empty", expected="the path of a folder")
    from kalmix.cli.stages import stages
    from kalmix.training.shards import prepare as prepare_shards
    from kalmix.training.shards.preparation import Progress

    number = (os.cpu_count() or 1) if workers is None else workers
    console = Console(highlight=False)
    more = f" and {len(source) - SHOWN} more" if len(source) > SHOWN else ""
    console.print(f"reading {', '.join(source[:SHOWN])}{more}", soft_wrap=True, markup=False)
    begin, tokens = time.monotonic(), 0
    with stages(console) as update:

        def show(progress: Progress) -> None:
            nonlocal begin, tokens
            if progress.tokens == 0:  # a tokenizer is trained before
                begin = time.monotonic()
            tokens = progress.tokens
            rate = tokens / max(time.monotonic() - begin, 1e-3)
            detail = f"{tokens:,} tokens, {rate:,.0f} tokens/s" if tokens else ""
            update(progress.stage, progress.fraction, detail)

        manifest = prepare_shards(preparation, output, workers=number, progress=show)
    _describe(manifest, Path(output), console)


def _licences(given: Sequence[str], sources: Sequence[str]) -> Licences:
    """Return the licences of all sources; those of each if one is given as SOURCE=LICENCE.

    Raises:
        ArgumentError: what stands before "=" is neither a source nor part of a URL.
    """
    common, own = list[str](), dict[str, list[str]]()
    for text in given:
        source = max((name for name in sources if text.startswith(f"{name}=")), key=len, default=None)
        before, equals, _ = text.partition("=")
        if source is not None:
            own.setdefault(source, []).append(text.removeprefix(f"{source}="))
        elif not equals or "://" in before:
            common.append(text)
        else:
            hint = "Quote a pattern, so that the shell passes it on as it is"
            expected = "LICENCE, or SOURCE=LICENCE with one of the sources"
            raise ArgumentError("licence", got=repr(text), expected=expected, hint=hint)
    return {name: (*common, *own.get(name, ())) for name in sources} if own else tuple(common)


@app.command(name="check")
def check(shards: Annotated[str, typer.Argument(help="Folder of shards.")]) -> None:
    """Compare all files of a folder of shards with their hashes, and print its counts."""
    from kalmix.cli.stages import stages

    console = Console(highlight=False)
    opened = Shards(shards)
    with stages(console) as update:
        opened.verify(lambda done: update("reading", done))
    _describe(opened.manifest, opened.folder, console)


def _describe(manifest: Manifest, folder: Path, console: Console) -> None:
    """Print the counts of each split, the tokenizer and the folder."""
    for split in ("train", "held_out"):
        documents, tokens, bytes_ = (manifest.count(split, unit) for unit in ("documents", "tokens", "bytes"))
        ratio = f", {bytes_ / tokens:.2f} bytes a token" if tokens else ""
        console.print(f"{split:>8}: {documents:,} documents, {tokens:,} tokens{ratio}", soft_wrap=True)
    if not manifest.count("train", "documents"):
        console.print("warning: all documents are held out, so these shards cannot train a model", soft_wrap=True)
    if manifest.skipped:
        console.print(f" skipped: {manifest.skipped:,} documents", soft_wrap=True)
    text = f"{folder}: {len(manifest.shards)} shards, tokenizer {manifest.tokenizer}"
    console.print(text, soft_wrap=True, markup=False)
