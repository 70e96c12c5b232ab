"""Text to train on, its split into training and held-out documents, and byte-level tokenizers.

The split comes first: tokenizers and models see only the training documents.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kalmix.errors import ArgumentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TEXT_SUFFIXES = frozenset(
    f".{name}"
    for words in (
        "txt md rst tex org html css csv tsv json jsonl yaml yml toml ini cfg xml log sql sh",
        "py pyi c h cc cpp hpp cu rs go java kt scala js ts jsx tsx rb php pl r jl lua swift hs ml el lisp",
    )
    for name in words.split()
)
_HIDDEN = re.compile(r"^(\.|__pycache__$)")
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_LONG_RUN = re.compile(r"\S{256}|\s{256}")
_EXPECTED = "a UTF-8 text file, or a folder of them"


class Corpus(NamedTuple):
    """Documents to train on and documents to evaluate on. They share no paragraph of 64 characters or more.

    Attributes:
        training: training documents.
        held_out: held-out documents.
    """

    training: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def held_out_text(self) -> str:
        """All held-out documents as one text, joined by blank lines."""
        return "\n\n".join(self.held_out)


def load_corpus(path: str | os.PathLike[str] | None = None, *, held_out: float = 0.06) -> Corpus:
    """Load text and split it into training and held-out documents.

    Args:
        path: UTF-8 text file, or folder whose files with a suffix in `TEXT_SUFFIXES` are read, subfolders included.
            Default: the documentation of this Python installation.
        held_out: fraction of the bytes to hold out, between 0 and 1.

    Raises:
        ArgumentError: `path` is missing, unreadable, empty or not UTF-8, or the text is too short to split.

    Example:
        >>> from pathlib import Path
        >>> from kalmix.training.corpus import load_corpus
        >>> for n in range(20):
        ...     _ = Path(f"{n}.txt").write_text(f"Document {n}: " + "a filter is a recurrence. " * 9)
        >>> corpus = load_corpus(".", held_out=0.1)
        >>> len(corpus.training), len(corpus.held_out)
        (18, 2)
    """
    if not 0 < held_out < 1:
        raise ArgumentError("held_out", got=held_out, expected="a fraction between 0 and 1")
    return split_documents(python_documentation() if path is None else read_documents(Path(path)), held_out)


def read_documents(path: Path) -> dict[str, str]:
    """Return the documents in a file or folder: name to text, sorted by name. Empty documents are left out.

    Line ends of Windows become line feeds.

    Raises:
        ArgumentError: as `load_corpus`.
    """
    if path.is_dir():
        files = sorted(path / name for name in walk_files(path))
    elif path.is_file():
        files = [path]
    elif path.exists():  # reading a FIFO or a device may never end
        raise ArgumentError("text", got=f"{str(path)!r}, which is not a regular file", expected=_EXPECTED)
    else:
        raise ArgumentError("text", got=f"{str(path)!r}, which does not exist", expected=_EXPECTED)
    documents = {file.relative_to(path).as_posix(): _decode(file) for file in files}
    documents = {name: text for name, text in documents.items() if text.strip()}
    if not documents:
        problem = "contains no text" if files else "contains no text files"
        raise ArgumentError("text", got=f"{str(path)!r}, which {problem}", expected=_EXPECTED)
    return documents


def is_text(name: str) -> bool:
    """Return whether a file's name has a suffix in `TEXT_SUFFIXES`."""
    return Path(name).suffix.lower() in TEXT_SUFFIXES


def vocabulary_size(vocabulary: Mapping[str, int]) -> int:
    """Return the number of rows that embedding and head need: the largest id plus 1, since ids may have gaps.

    Args:
        vocabulary: id of each token of a tokenizer.
    """
    return max(vocabulary.values()) + 1


def is_hidden(name: str) -> bool:
    """Return whether `walk_files` leaves out a folder of this name."""
    return _HIDDEN.match(name) is not None


def walk_files(folder: Path, wanted: Callable[[str], bool] = is_text, excluded: Collection[str] = ()) -> Iterator[str]:
    """Yield paths relative to `folder` of its regular files, without hidden ones.

    Args:
        folder: folder to search, subfolders included.
        wanted: called with the name of a file; returns whether to yield it.
        excluded: names of subfolders to leave out.

    Raises:
        OSError: a folder cannot be read. One that is deleted meanwhile is left out.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for root, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name not in excluded and not is_hidden(name)]
        relative = Path(root).relative_to(folder)
        yield from (
            (relative / name).as_posix()
            for name in files
            if wanted(name) and name[0] != "." and Path(root, name).is_file()
        )


def is_utf16(data: bytes) -> bool:
    """Return whether data begin with a byte-order mark of UTF-16, as some programs of Windows write it."""
    return data[:2] in (b"\xff\xfe", b"\xfe\xff")


def _decode(file: Path) -> str:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        got = f"{str(file)!r}, which cannot be read ({error.strerror})"
        raise ArgumentError("text", got=got, expected=_EXPECTED) from None
    except UnicodeDecodeError as error:
        form = "UTF-16" if is_utf16(error.object) else f"not UTF-8 (byte {error.start})"
        got = f"{str(file)!r}, which is {form}"
        raise ArgumentError("text", got=got, expected=_EXPECTED) from None
    if "\0" in text:
        raise ArgumentError("text", got=f"{str(file)!r}, which is binary", expected=_EXPECTED)
    return text.replace("\r\n", "\n")  # paragraphs are found by their blank lines


def python_documentation() -> dict[str, str]:
    """Return the documentation of this Python installation: topics of `help()`, and docstrings of the standard library.

    This is about 2 MB of English text and code. Some installations lack the topics; then only the docstrings are
    returned.

    Raises:
        ArgumentError: the installation has no documentation.
    """
    documents: dict[str, str] = {}
    with suppress(ImportError):
        from pydoc_data.topics import topics

        documents.update((f"help({name!r})", text.strip()) for name, text in sorted(topics.items()))
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(walk_files(library, lambda name: name.endswith(".py"), _EXCLUDED_FOLDERS)):
        text = _docstrings(library / name)
        if len(text) >= 200:
            documents[name] = text
    if not documents:
        problem = "is missing, and this Python installation has no documentation to train on"
        raise ArgumentError("text", problem=problem, expected=_EXPECTED)
    return documents


def _docstrings(file: Path) -> str:
    """Return all docstrings in a Python file, in the order of the source."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # a template, or a test of the parser
        return ""
    docstrings: list[str] = []

    def visit(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        docstrings.append(ast.get_docstring(node) or "")
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child)

    visit(tree)
    # Escapes can produce lone surrogates, which UTF-8 cannot encode.
    return "\n\n".join(filter(None, docstrings)).encode(errors="replace").decode()


def split_documents(documents: Mapping[str, str], held_out: float) -> Corpus:
    """Hold out whole documents, chosen by a hash of their names, up to about `held_out` of all bytes.

    If no choice comes close, as with a single file, also hold out the end of the longest document, cut between two
    paragraphs. Paragraphs that also occur in the held-out text are removed from the training text, so that the model is
    not scored on text that it was trained on.

    Args:
        documents: name to text.
        held_out: fraction of the bytes to hold out.

    Raises:
        ArgumentError: the text is too short to split.
    """
    size = {name: len(text.encode()) for name, text in documents.items()}
    target = max(1, round(held_out * sum(size.values())))
    held_out_names: list[str] = []
    for name in sorted(documents, key=_hash):
        if len(held_out_names) + 1 == len(documents):
            break
        if size[name] + sum(size[other] for other in held_out_names) <= 1.1 * target:
            held_out_names.append(name)
    training = {name: text for name, text in documents.items() if name not in held_out_names}
    held_out_texts = [documents[name] for name in documents if name in held_out_names]
    missing = target - sum(size[name] for name in held_out_names)
    if missing > target / 2:
        longest = max(training, key=lambda name: (size[name], name))
        training[longest], tail = _split_tail(training[longest], missing)
        held_out_texts.append(tail)
    held_out_keys = {key for text in held_out_texts for key in _paragraph_keys(_paragraphs(text))}
    rest = tuple(filter(str.strip, (_remove_paragraphs(text, held_out_keys) for text in training.values())))
    if not rest or not any(map(str.strip, held_out_texts)):
        raise ArgumentError(
            "text", problem=f"has only {sum(size.values())} bytes", expected="enough text to hold some out"
        )
    return Corpus(rest, tuple(held_out_texts))


def _hash(name: str) -> bytes:
    """Return the SHA-256 of a name. Lone surrogates stand for bytes of a file's name that are not UTF-8."""
    return hashlib.sha256(name.encode(errors="surrogatepass")).digest()


def _split_tail(text: str, tail: int) -> tuple[str, str]:
    """Cut off about `tail` characters at the end: between two paragraphs if possible, else lines, else anywhere."""
    position = max(1, len(text) - tail)
    for separator in ("\n\n", "\n"):
        found = text.rfind(separator, position // 2, position)
        if found > 0:
            return text[:found], text[found:].lstrip("\n")
    return text[:position], text[position:]


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n[ \t]*\n", text)


def _paragraph_keys(paragraphs: Iterable[str]) -> list[str]:
    """Return keys that are equal for paragraphs with the same words.

    Paragraphs under 64 characters have no key: they are common phrases, not copied text.
    """
    words = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return [text for text in words if len(text) >= 64]


def _remove_paragraphs(text: str, keys: set[str]) -> str:
    return "\n\n".join(paragraph for paragraph in _paragraphs(text) if " ".join(paragraph.split()) not in keys)


def train_tokenizer(texts: Iterable[str], kind: str = "bpe", *, vocab_size: int = 2048) -> Tokenizer:
    """Train a lossless byte-level tokenizer with one special token, `END_OF_TEXT` (id 0).

    Texts are cut inside runs of 256 characters without a space, because learning takes quadratic time in the length of
    a word.

    Args:
        texts: texts to learn merges from.
        kind: "bpe" (byte-pair encoding), or "bytes" (one token per byte).
        vocab_size: largest vocabulary of "bpe", at least 257: 256 bytes and `END_OF_TEXT`.

    Raises:
        ArgumentError: `kind` is unknown, or `vocab_size` below 257.

    Example:
        >>> from kalmix.training.corpus import train_tokenizer
        >>> tokenizer = train_tokenizer([], "bytes")
        >>> tokenizer.get_vocab_size(), len(tokenizer.encode("filter").ids)
        (257, 6)
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if kind not in ("bpe", "bytes"):
        raise ArgumentError("tokenizer", got=repr(kind), expected="'bpe' or 'bytes'")
    if vocab_size < 257:
        raise ArgumentError("vocab_size", got=vocab_size, expected="at least 257 (256 bytes and the end of a text)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size if kind == "bpe" else 257,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_cut_long_runs(texts) if kind == "bpe" else [], trainer)
    return tokenizer


def _cut_long_runs(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in pieces, cut after every 256 characters of a run without a space, or of spaces alone."""
    for text in texts:
        start = 0
        for run in _LONG_RUN.finditer(text):
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


def nats_to_bits_per_byte(nats: float, text: str) -> float:
    """Convert a negative log-likelihood to bits per byte, which compare across tokenizers.

    Args:
        nats: negative log-likelihood of all of `text`.
        text: the text.
    """
    return nats / (math.log(2) * len(text.encode()))
