"""From documents to token shards. Here: what to prepare, and how; no pyarrow and no numpy."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from elastic_ring.files import absolute
from elastic_ring.validation import Must, NonNegativeInt, PositiveInt, settings

OnBadInput = Literal["fail", "skip"]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MAX_RECORD_BYTES = 64 * 2**20
"""The most bytes of a line, of a record's document, and of a document out of a compressed file."""
PARTS = ("messages", "prompt", "input", "history", "completion", "system", "tools")
"""What a record of a conversation has, each in a column."""


def chat_columns(text: str) -> dict[str, str]:
    """The column of each part that `columns` names. Raises ValueError for text that names none."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    names = {part.strip(): name.strip() for part, _, name in pairs}
    is_whole = ("messages" in names) != {"prompt", "completion"}.issubset(names)
    if text and not (is_whole and all(names.values()) and len(names) == len(pairs) and names.keys() <= {*PARTS}):
        raise ValueError(
            f"columns={text!r}: write PART=COLUMN[,PART=COLUMN...] with messages, or with prompt and completion; the "
            f"parts are {', '.join(PARTS)}"
        )
    return names


@settings
class PrepareConfig:
    """What to prepare, and how. `workers` and allowances do not change the result."""

    _prefix: ClassVar[str] = ""

    sources: Annotated[tuple[str, ...], Field(min_length=1), Must("a tuple of at least one path or URI")]
    """Files, folders, patterns or saved Hugging Face datasets: local, s3:// or as fsspec opens them."""
    out: str
    """The folder for shards and manifest, local or s3://bucket/prefix."""
    weights: Annotated[tuple[Weight, ...], Must("one number above 0 for each source")] = ()
    """How often each source is trained on, by its tokens; if left out, all are one corpus."""
    tokenizer: str = "bytes"
    """bytes, or a local folder with a saved tokenizer."""
    end_of_document: str | None = None
    """The token that ends a document; the tokenizer's eos_token if left out."""
    text_column: str = "text"
    """Column of Parquet and Arrow, key of JSON lines."""
    chat: bool = False
    """Records are conversations: they go through the tokenizer's chat template, and assistant turns count."""
    columns: str = ""
    """Where conversations of another form are: PART=COLUMN[,PART=COLUMN...], as prompt=question,completion=answer."""
    drop_duplicates: bool = False
    """Keep the first of documents with equal bytes."""
    align_tokens: PositiveInt = 1
    """Fill documents up to multiples of this; 128 for patterns on GPUs."""
    on_bad_input: OnBadInput = "fail"
    """Files and lines that cannot be read: fail, or skip and count them."""
    max_bad_share: Annotated[float, Field(ge=0, le=1), Must("a share between 0 and 1")] = 0.01
    """How much may be skipped, of records and of bytes."""
    allow_left_out: bool = False
    """Go on where a source has more bytes that are no text than it has text."""
    workers: NonNegativeInt | None = None
    """Processes of a Ray cluster; 0 for this process alone, as for up to 32 MiB if left out, else all its CPUs."""
    piece_bytes: PositiveInt = 16 << 20
    """About how much input becomes a shard."""
    row_group_tokens: PositiveInt = 1 << 16
    """Tokens that are read at once in training."""

    def __post_init__(self) -> None:
        # The workers have working directories of their own.
        for name in ("out", "tokenizer") if self.tokenizer != "bytes" else ("out",):
            object.__setattr__(self, name, absolute(getattr(self, name)))
        object.__setattr__(self, "sources", tuple(map(absolute, self.sources)))
        if not all(self.sources):
            raise ValueError(f"sources={self.sources!r}: none may be empty (--source URI[,URI...])")
        if self.chat and self.tokenizer == "bytes":
            raise ValueError(
                "tokenizer='bytes': bytes have no chat template: give a folder with a tokenizer that has one "
                "(--tokenizer FOLDER), or leave chat out"
            )
        if self.columns and not self.chat:
            raise ValueError(f"columns={self.columns!r}: are of conversations (--chat); text has --text-column")
        chat_columns(self.columns)
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(f"weights={self.weights!r}: give one for each of the {len(self.sources)} sources, or none")
        if self.row_group_tokens % self.align_tokens:
            raise ValueError(
                f"align_tokens={self.align_tokens}: row_group_tokens={self.row_group_tokens} must be a multiple of it"
            )
