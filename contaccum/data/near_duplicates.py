"""Comparison of texts: the same text, near-duplicates, and groups of records that share texts.

Two texts are the same if `normalise` returns the same for both; a model reads them as they are.

Two texts are near-duplicates if the Jaccard similarity of their sets of character 5-grams, without
punctuation and tags of HTML, is at least `LEAST_OVERLAP`. For example, two sentences of twelve
words may differ in one word. The similarity is computed from the `_SKETCH_SIZE` smallest hashes of
the 5-grams of a text. It is exact for texts with fewer 5-grams, and has an error of about 0.04 for
longer ones. No pair is missed: pairs that are not compared cannot have the similarity.

Two records are linked if they share a text (a query or a positive), have nearly the same text, or
have the same document of the corpus, one of them without its title. A group is a connected
component of the graph of linked records. A split keeps a group on one side.

Sources: Beyer et al., "On synopses for distinct-value estimation under multiset operations", 2007
(similarity by the smallest hashes); Xiao et al., "Efficient similarity joins for near duplicate
detection", 2008 (pairs that need no comparison).
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from contaccum.data.beir import BeirDataset, list_positives
from contaccum.data.records import Passage, Record

if TYPE_CHECKING:
    from scipy.cluster.hierarchy import DisjointSet

LEAST_OVERLAP = 0.7
"""Least Jaccard similarity of near-duplicates."""

_GRAM_LENGTH = 5
_SKETCH_SIZE = 128
_PADDING = np.uint64(2**64 - 1)
# Factors of the five characters of a 5-gram in its hash: the primes of xxHash.
_HASH_FACTORS = np.array(
    [
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    ],
    dtype=np.uint64,
)
_LAST_HASH = _PADDING - np.uint64(1)
# Two sets of a and b grams with a Jaccard similarity J share J / (1 + J) * (a + b) grams.
_SHARE_OF_SUM = LEAST_OVERLAP / (1 + LEAST_OVERLAP)
# Number of hashes that a full sketch shares with a near-duplicate.
_LEAST_SHARED_BY_FULL = math.ceil(LEAST_OVERLAP * _SKETCH_SIZE)
_TOLERANCE = 1e-6  # of rounding, in numbers of grams
# Number of texts with a gram above which the gram is not used without need.
_FREQUENT = 500
_TEXTS_PER_BLOCK = 4096

# In the text of a PDF, the end of a line follows the hyphen.
_SOFT_HYPHEN = re.compile("\u00ad\\s*")
_SHAPES = {
    **dict.fromkeys("`\u2018\u2019\u201a\u201b\u2032\u2035\u2039\u203a\u02b9\u02bb\u02bc", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u300c\u300d", '"'),
    **dict.fromkeys("\u2043\u2212", "-"),
    "\u2800": " ",  # Braille pattern blank
    # Letters that Unicode does not decompose into a base letter and an accent.
    **dict(zip("ıłøđðħŧ", "iloddht", strict=True)),
    "æ": "ae",
    "œ": "oe",
    "þ": "th",
}
# Default-ignorable characters of Unicode that are no format characters (Cf).
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
# List<String>, for example, only looks as if it had tags.
_IS_HTML = re.compile(r"</[a-z]|<br\b")
_TAG = re.compile(r"</?[a-z][^<>]*>")


class _CharacterTable(dict[int, str]):
    """Table for `str.translate`, which is filled when a character is first seen."""

    def __init__(self, replace: Callable[[str], str]) -> None:
        super().__init__()
        self._replace = replace

    def __missing__(self, code_point: int) -> str:
        return self.setdefault(code_point, self._replace(chr(code_point)))


def _fold_character(character: str) -> str:
    """Return the usual shape of a decomposed character; "" for accents and what is invisible."""
    if character in _SHAPES:
        return _SHAPES[character]
    category = unicodedata.category(character)
    is_control = category == "Cc" and not character.isspace()
    # Classes from 200 are accents, and 10 to 36 are points of Hebrew and Arabic. Marks of other
    # classes are vowels (of Hindi, of Thai), or make another letter (of Japanese).
    mark_class = unicodedata.combining(character)
    is_accent = 10 <= mark_class <= 36 or mark_class >= 200
    if category == "Cf" or is_control or is_accent or _IGNORABLE.match(character):
        return ""
    return "-" if category == "Pd" else character


def _keep_word_character(character: str) -> str:
    r"""Return letters, marks, numbers and the underscore, and a space for other characters.

    The pattern ``\w`` has no marks, so it would drop the vowel signs of Hindi or Thai.
    """
    return character if character == "_" or unicodedata.category(character)[0] in "LMN" else " "


_FOLDED = _CharacterTable(_fold_character)
_WORD_CHARACTERS = _CharacterTable(_keep_word_character)


def fold_case(text: str) -> str:
    """Return a text in lower case, with normal character widths and single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def normalise(text: str) -> str:
    """Return a text in the form in which it is compared.

    HTML entities are decoded. Invisible characters and accents are removed. Characters are in lower
    case and of normal width, quotes and dashes have one shape, and blanks are single spaces.
    """
    while "&" in text:
        decoded = html.unescape(text)
        if decoded == text:
            break
        text = decoded
    if not text.isascii():
        text = _SOFT_HYPHEN.sub("", text).replace("\u00b4", "'")  # NFKD makes a space of this quote
        text = unicodedata.normalize("NFKD", text)
    folded = text.casefold().translate(_FOLDED)
    # Quotation marks of TeX and of the Penn Treebank.
    return fold_case(folded.replace("''", '"'))


def get_words(text: str) -> str:
    """Return the words of a normalised text without tags and punctuation; if none, that text."""
    normalised_text = normalise(text)
    words = normalised_text
    if _IS_HTML.search(words):
        words = _TAG.sub(" ", words)
    return " ".join(words.translate(_WORD_CHARACTERS).split()) or normalised_text


def join_near_duplicates(
    texts: Sequence[str], groups: DisjointSet, show_progress: bool = False
) -> int:
    """Merge the groups of near-duplicates, sets of indices, in place; return the number of merges.

    Texts of one group are not compared. Memory holds about 5 KB for each text.
    """
    num_groups = groups.n_subsets
    labels = np.array([groups[number] for number in range(len(texts))], dtype=np.int64)
    for number, near in _find_pairs(_make_sketches(texts), labels, show_progress):
        for near_number in near:
            if groups.merge(number, near_number):
                labels[labels == labels[near_number]] = labels[number]
    return num_groups - groups.n_subsets


def find_near_duplicates(
    texts: Iterable[str], references: Iterable[str], show_progress: bool = False
) -> set[str]:
    """Return the texts that are near-duplicates of one of the references."""
    sketches_of_references = _make_sketches(list(references))
    distinct_texts = list(set(texts))
    found: set[str] = set()
    starts = range(0, len(distinct_texts), _TEXTS_PER_BLOCK)  # limits the memory
    for start in tqdm(starts, desc="held-out texts", leave=False, disable=not show_progress):
        block = distinct_texts[start : start + _TEXTS_PER_BLOCK]
        sketches = np.concatenate([_make_sketches(block), sketches_of_references])
        is_text = np.arange(len(sketches)) < len(block)
        for number, near in _find_pairs(sketches, is_text):
            found.update(block[each] for each in (number, *near) if is_text[each])
    return found


def _find_pairs(
    sketches: np.ndarray, labels: np.ndarray, show_progress: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of a text, and of its near-duplicates with another label, each pair once.

    The caller may change labels meanwhile. Only texts that share one of their rarest 5-grams are
    compared, so that the time is about linear in the number of texts that are made from one
    template. It grows faster only if most of their similarities are close to the bound.
    """
    # From the smallest set of 5-grams to the largest: a full sketch of a larger set ends earlier.
    order = np.lexsort((_PADDING - sketches[:, -1], (sketches < _PADDING).sum(axis=1)))
    index = _GramIndex(sketches[order])
    order_of_ends = _PADDING - index.sketches[:, -1]  # 0 where the sketch is not full
    is_joined = np.zeros(len(index.frequencies), dtype=bool)  # all texts of the gram have one label
    for row, number in enumerate(
        tqdm(order, desc="near-duplicates", unit=" texts", leave=False, disable=not show_progress)
    ):
        sketch = index.sketches[row]
        # A text shares at least this number of grams with a near-duplicate that is larger. The
        # bound without "larger" is lower, so more texts would share one of the rarest grams.
        size = index.sizes[row]
        least_shared = min(2 * _SHARE_OF_SUM * size, LEAST_OVERLAP * _SKETCH_SIZE)
        grams, num_other_grams = index.find_rarest(row, least_shared)
        # Much larger texts are no near-duplicates.
        if size < _LEAST_SHARED_BY_FULL:
            end = np.searchsorted(index.sizes, size / LEAST_OVERLAP + _TOLERANCE, side="right")
        else:
            last_hash = sketch[_LEAST_SHARED_BY_FULL - 1]
            end = np.searchsorted(order_of_ends, _PADDING - last_hash, side="right")
        grams = grams[~is_joined[grams]]
        rows_of_grams = index.get_rows(grams, row + 1, end)
        for gram, rows in zip(grams, rows_of_grams, strict=True):
            if len(rows) > _FREQUENT and labels[order[rows[0]]] == labels[number]:
                [all_rows] = index.get_rows(np.array([gram]), 0, len(sketches))
                is_joined[gram] = (labels[order[all_rows]] == labels[number]).all()
        rows = np.concatenate([np.zeros(0, dtype=np.int32), *rows_of_grams])
        has_other_label = labels[order[rows]] != labels[number]
        rows, num_shared = np.unique(rows[has_other_label], return_counts=True)
        # The sketch of the larger text ends first, so that its size counts as a whole.
        limits = np.minimum(index.sketches[rows, -1], _LAST_HASH)
        sum_of_sizes = np.searchsorted(sketch, limits, side="right") + index.sizes[rows]
        most_shared = num_shared + num_other_grams
        rows = rows[most_shared >= _SHARE_OF_SUM * sum_of_sizes - _TOLERANCE]
        near = rows[index.compute_overlaps(row, rows) >= LEAST_OVERLAP]
        if len(near) > 0:
            yield number, order[near]


class _GramIndex:
    """Index of the 5-grams of n sketches, uint64 (n, `_SKETCH_SIZE`). A number names a 5-gram."""

    def __init__(self, sketches: np.ndarray) -> None:
        self.sketches = sketches
        is_hash = sketches < _PADDING
        self.sizes = is_hash.sum(axis=1)  # number of hashes in each sketch, int64 (n,)
        # `frequencies` has the number of sketches with each gram.
        hashes, gram_numbers, self.frequencies = np.unique(
            sketches[is_hash], return_inverse=True, return_counts=True
        )
        self._grams = np.full(sketches.shape, len(hashes), dtype=np.int32)
        self._grams[is_hash] = gram_numbers
        # The pairs of a gram and a row, in order.
        self._pairs = np.sort(gram_numbers * len(sketches) + np.nonzero(is_hash)[0])
        self._rows = (self._pairs % len(sketches)).astype(np.int32)

    def get_rows(self, grams: np.ndarray, start: int, end: int) -> list[np.ndarray]:
        """Return, for each of some grams, the rows from start to end - 1 that have it, in order."""
        starts = np.searchsorted(self._pairs, grams * len(self.sketches) + start)
        ends = np.searchsorted(self._pairs, grams * len(self.sketches) + end)
        return [self._rows[i:j] for i, j in zip(starts.tolist(), ends.tolist(), strict=True)]

    def find_rarest(self, row: int, least_shared: float) -> tuple[np.ndarray, int]:
        """Return the rarest grams of a sketch, and the number of its other grams.

        A sketch that shares ``least_shared`` grams with this one has at least one of them. Further
        rare grams are returned too: a sketch with few of these needs no comparison.
        """
        grams = self._grams[row, : self.sizes[row]].astype(np.int64)
        frequencies = self.frequencies[grams]
        order = np.argsort(frequencies, kind="stable")
        num_rarest = len(grams) - math.ceil(least_shared - _TOLERANCE) + 1
        num_infrequent = int((frequencies <= _FREQUENT).sum())
        num_rarest = max(num_rarest, min(num_rarest + len(grams) // 8, num_infrequent))
        return grams[order[:num_rarest]], len(grams) - num_rarest

    def compute_overlaps(self, row: int, rows: np.ndarray) -> np.ndarray:
        """Return the Jaccard similarities of a sketch and c other sketches, float64 (c,).

        Those are of the 5-grams up to the last hash of a full sketch, which are all known.
        """
        sketch, others = self.sketches[row], self.sketches[rows]
        grams = self._grams[row, : self.sizes[row]]
        num_shared = np.isin(self._grams[rows], grams).sum(axis=1)
        limits = np.minimum(np.minimum(sketch[-1], others[:, -1]), _LAST_HASH)
        num_grams = np.searchsorted(sketch, limits, side="right")
        num_other_grams = (others <= limits[:, None]).sum(axis=1)
        return num_shared / (num_grams + num_other_grams - num_shared)


def _make_sketches(texts: Sequence[str]) -> np.ndarray:
    """Return the smallest hashes of the 5-grams of n texts, uint64 (n, `_SKETCH_SIZE`)."""
    sketches = np.full((len(texts), _SKETCH_SIZE), _PADDING)
    for sketch, text in zip(sketches, texts, strict=True):
        characters = np.frombuffer(get_words(text).encode("utf-32-le"), dtype=np.uint32)
        length = min(_GRAM_LENGTH, len(characters))
        num_grams = len(characters) - length + 1
        hashes = np.zeros(num_grams, dtype=np.uint64)
        for offset, factor in enumerate(_HASH_FACTORS[:length]):
            hashes += factor * characters[offset : offset + num_grams]  # modulo 2**64
        hashes ^= hashes >> np.uint64(32)
        hashes *= _HASH_FACTORS[0]
        hashes ^= hashes >> np.uint64(32)
        smallest = np.unique(hashes)[:_SKETCH_SIZE]
        sketch[: len(smallest)] = smallest
    return sketches


class Grouping(NamedTuple):
    """The groups of the records. A group is named by a number."""

    group_of_record: list[int]
    queries_of_group: dict[int, int]  # {group: number of distinct queries of its records}
    key_of_group: dict[int, str]  # {group: its first query}, whatever the order of the records
    groups_of_test: set[int]  # those that are linked with the test set that the data came with
    num_near_duplicates: int  # texts that nearly equal an earlier text

    def count_queries(self, groups: Iterable[int]) -> int:
        """Return the number of distinct queries in some groups."""
        return sum(self.queries_of_group[group] for group in groups)


def group_records(
    records: Sequence[Record],
    test_texts: Iterable[str] = (),
    by_query: bool = False,
    documents: Iterable[Passage] = (),
    show_progress: bool = False,
) -> Grouping:
    """Group the records that are linked with each other, or with texts of a given test set.

    ``by_query`` links them by queries alone, and by passages that are queries too, or nearly so: a
    held-out query may have passages in training. Else, ``documents``, the corpus, link passages
    with and without their title.
    """
    # Each distinct normalised text has a number, and a group is a set of these.
    text_numbers: dict[str, int] = {}

    def get_number(text: str) -> int:
        return text_numbers.setdefault(normalise(text), len(text_numbers))

    links = []
    for record in records:
        query = get_number(record.query)
        if not by_query:
            links += [(query, get_number(positive)) for positive in record.positives]
    numbers_of_test = set(map(get_number, test_texts))
    if by_query:
        passages = [positive for record in records for positive in record.positives]
        passages_like_queries = find_near_duplicates(passages, text_numbers)
        for record in records:
            for positive in passages_like_queries.intersection(record.positives):
                links.append((get_number(record.query), get_number(positive)))

    from scipy.cluster.hierarchy import DisjointSet  # slow, and not needed for --help

    groups = DisjointSet(range(len(text_numbers)))
    for query, passage in links:
        groups.merge(query, passage)
    num_near_duplicates = join_near_duplicates(list(text_numbers), groups, show_progress)
    if not by_query:
        number_of_words = {get_words(text): number for text, number in text_numbers.items()}
        for document in documents:
            if document.title:
                with_title = number_of_words.get(get_words(document.passage))
                without_title = number_of_words.get(get_words(document.text))
                if with_title is not None and without_title is not None:
                    groups.merge(with_title, without_title)

    group_of_record = []
    queries: dict[int, set[str]] = {}
    key_of_group: dict[int, str] = {}
    for record in records:
        query_text = normalise(record.query)
        group = groups[text_numbers[query_text]]
        group_of_record.append(group)
        queries.setdefault(group, set()).add(query_text)
        key = fold_case(record.query)
        key_of_group[group] = min(key, key_of_group.get(group, key))
    return Grouping(
        group_of_record,
        queries_of_group={group: len(members) for group, members in queries.items()},
        key_of_group=key_of_group,
        groups_of_test={groups[number] for number in numbers_of_test},
        num_near_duplicates=num_near_duplicates,
    )


def group_queries(dataset: BeirDataset) -> dict[str, int]:
    """Return {query id: number of its group} for a data set, by the same rule as a split.

    Queries of a group share a relevant document, or have nearly the same text as each other or as a
    relevant document. Their scores are not independent of each other.
    """
    records = [Record(*pair, negatives=[]) for pair in list_positives(dataset)]
    groups = group_records(records).group_of_record
    return dict(zip(dataset.queries, groups, strict=True))
