"""Drafters by name: options, draft models, vocabularies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from outrider.device import Placement, Precision
from outrider.drafters import shipped
from outrider.drafters.base import MOST_DRAFTS
from outrider.drafters.build import make_drafter, resolve_draft
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.head_folder import save_head
from outrider.drafters.lm import LMDrafter
from outrider.drafters.merge import MergedDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.tree import TreeShape
from outrider.drafters.vocab import check_vocabulary
from outrider.engine.config import MAX_DRAFT_TOKENS
from outrider.errors import ConfigError, DataError, ModelNotFound, VocabularyMismatch
from outrider.models.config import LlamaConfig
from outrider.models.llama import LlamaTarget
from outrider.models.native import NativeTarget
from outrider.models.tokenizer import Tokenizer
from outrider.native.library import is_available

from .heads import TARGET_CONFIG, tiny_head, tiny_info, tiny_target
from .helpers import wish

CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=32,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_width=16,
    norm_eps=1e-5,
    max_positions=64,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)
CPU_F32 = Placement(device=torch.device("cpu"), precision="float32")
LETTERS = "abcdefghijkl"


def tokenizer(letters: str) -> Tokenizer:
    backend = Backend(models.BPE(vocab={letter: token for token, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def model(letters: str | None = LETTERS, vocab_size: int = 16) -> LlamaTarget:
    target = LlamaTarget.random(replace(CONFIG, vocab_size=vocab_size), CPU_F32, seed=1)
    target.tokenizer = None if letters is None else tokenizer(letters)
    return target


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return model()


def test_none_is_no_drafter(target: LlamaTarget) -> None:
    assert make_drafter("none", target) is None


def test_ngram_options(target: LlamaTarget) -> None:
    default, set_ = make_drafter("ngram", target), make_drafter("ngram:max_match=6,min_match=2", target)
    assert isinstance(default, NGramDrafter) and isinstance(set_, NGramDrafter)
    assert (default.max_match, default.min_match) == (NGramDrafter().max_match, NGramDrafter().min_match)
    assert (set_.max_match, set_.min_match) == (6, 2)


def test_suffix_options(target: LlamaTarget) -> None:
    default = make_drafter("suffix", target)
    drafter = make_drafter(
        "suffix:rule=paper,max_depth=9,width=3,factor=2.5,offset=1,min_prob=0.3,max_nodes=77", target
    )
    assert isinstance(default, SuffixDrafter) and isinstance(drafter, SuffixDrafter)
    plain = SuffixDrafter()
    for name in ("rule", "max_depth", "width", "min_prob", "score_rule", "max_nodes"):
        assert getattr(default, name) == getattr(plain, name)
    assert (drafter.rule, drafter.max_depth, drafter.width, drafter.max_nodes) == ("paper", 9, 3, 77)
    assert (drafter.score_rule.factor, drafter.score_rule.offset, drafter.score_rule.min_prob) == (2.5, 1, 0.3)


@pytest.mark.parametrize(
    ("spec", "tree", "expected"),
    [
        ("self", None, None),
        ("self:depth=3", None, TreeShape(depth=3)),
        ("slice:2,width=2,num_nodes=5", None, TreeShape(width=2, num_nodes=5)),
        ("slice:2:width=2", TreeShape(depth=7), TreeShape(depth=7, width=2)),
        ("random", TreeShape(depth=7), TreeShape(depth=7)),
        ("self:min_level=0.2", None, TreeShape(min_level=0.2)),
    ],
)
def test_tree_options(target: LlamaTarget, spec: str, tree: TreeShape | None, expected: TreeShape | None) -> None:
    drafter = make_drafter(spec, target, tree=tree)
    assert isinstance(drafter, LMDrafter) and drafter.tree == expected


def test_draft_models_made_of_the_target(target: LlamaTarget) -> None:
    whole, part, other = (make_drafter(spec, target) for spec in ("self", "slice:2", "random"))
    assert isinstance(whole, LMDrafter) and isinstance(part, LMDrafter) and isinstance(other, LMDrafter)
    assert (whole.name, part.name, other.name) == ("self", "slice:2", "random")
    assert (whole.model.spec.precision, whole.model.spec.num_layers) == ("int8", 3)
    assert (part.model.spec.precision, part.model.spec.num_layers) == ("float32", 2)
    assert other.model.spec.fingerprint != target.spec.fingerprint
    for sequence, drafter in enumerate((whole, part, other)):
        drafter.start(sequence, [1, 2, 3])
        assert len(drafter.propose([wish([1, 2, 3], 3, sequence=sequence)])[0]) == 3


def test_the_precision_of_a_draft_model_can_be_chosen(target: LlamaTarget) -> None:
    for spec in ("self", "slice:1"):
        drafter = make_drafter(spec, target, dtype="bfloat16")
        assert isinstance(drafter, LMDrafter) and drafter.model.spec.precision == "bfloat16"
    for spec in ("self:dtype=int4", "slice:1,dtype=int4,depth=2,width=2"):
        drafter = make_drafter(spec, target, dtype="bfloat16")
        assert isinstance(drafter, LMDrafter) and drafter.model.spec.precision == "int4"
    with pytest.raises(ConfigError, match=r"'int3'.*allowed.*int8.*int4"):
        make_drafter("self", target, dtype="int3")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "empty"),
        ("ngram:max_mtch=3", "'max_mtch'.*did you mean 'max_match'"),
        ("suffix:min_match=3", "unknown option 'min_match'.*allowed: rule, max_depth"),
        ("none:depth=2", "takes none"),
        ("self:dept=2", "did you mean 'depth'"),
        ("ngram:max_match=three", "max_match is an integer, not 'three'"),
        ("suffix:factor=x", "factor is a number"),
        ("ngram:max_match=3,max_match=4", "twice"),
        ("ngram:3", "name=value"),
        ("ngram:max_match=0", "not possible"),
        ("self:width=0", "width 0 is not possible"),
        ("self:min_level=1.5", "min_level 1.5 is not possible; allowed: 0 to 1"),
        ("self:min_level=much", "option min_level is a number"),
        ("slice", "how many layers"),
        ("slice:many", "how many layers"),
        ("slice:4", "1 to 3 layers"),
    ],
)
def test_mistakes_in_a_drafters_name(target: LlamaTarget, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_drafter(spec, target)


def test_what_is_neither_a_drafter_nor_a_model_is_named(target: LlamaTarget) -> None:
    with pytest.raises(ModelNotFound, match=r"'ngrm' is none of none, ngram.*did you mean 'ngram'"):
        make_drafter("ngrm", target, offline=True)


def test_past_answers_are_preloaded(target: LlamaTarget, tmp_path: Path) -> None:
    rows = [
        {"token_ids": [1, 2, 3, 4]},
        {"text": "def"},
        {"messages": [{"role": "user", "content": "kl"}, {"role": "assistant", "content": "gh"}]},
        {"conversations": [{"from": "human", "value": "ka"}, {"from": "gpt", "value": "ij"}]},
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    drafter = make_drafter(f"suffix:preload={path}", target)
    assert isinstance(drafter, SuffixDrafter)
    contexts = {0: [1], 1: [3], 2: [6], 3: [8], 4: [10]}
    for sequence, tokens in contexts.items():
        drafter.start(sequence, tokens)
    proposals = drafter.propose([wish(tokens, 3, sequence=s) for s, tokens in contexts.items()])
    assert [p.tokens for p in proposals] == [(2, 3, 4), (4, 5), (7,), (9,), ()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{}\n{broken", "line 2 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"token_ids": [1, 16]}', "line 1: token id 16 is not possible; allowed: 0 to 15"),
        ('{"token_ids": "abc"}', "give a list of token ids"),
        ('{"messages": ["hello"]}', "line 1: messages is not a list of objects"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "holds no answers"),
        ('{"text": "\\ud800"}', "line 1: .*surrogate"),
    ],
)
def test_files_of_past_answers_that_cannot_be_used(
    target: LlamaTarget, tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "answers.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        make_drafter(f"suffix:preload={path}", target)


@pytest.mark.parametrize(("letters", "vocab_size"), [(LETTERS, 16), (LETTERS + "mn", 16), (LETTERS, 12), (LETTERS, 24)])
def test_vocabularies_that_fit(letters: str, vocab_size: int) -> None:
    check_vocabulary(model(letters, vocab_size), model())


def test_the_first_token_that_differs_is_named() -> None:
    with pytest.raises(VocabularyMismatch, match=r"token id 3 is 'x' in draft model .* and 'd' in target"):
        check_vocabulary(model("abcxefghijkl"), model())
    with pytest.raises(VocabularyMismatch, match=r"token id 10 is '' in draft model .* and 'k' in target"):
        check_vocabulary(model(LETTERS[:10]), model())


def test_without_a_tokenizer_the_draft_model_must_not_have_fewer_tokens() -> None:
    check_vocabulary(model(None, 20), model())
    with pytest.raises(VocabularyMismatch, match="token id 14 is the first that the draft model lacks"):
        check_vocabulary(model(None, 14), model())


def test_tokens_that_the_draft_model_lacks_can_be_read() -> None:
    drafter = LMDrafter(model(LETTERS, 12), name="draft", vocab_size=16)
    drafter.start(0, [3, 15, 2])  # 15: a padded row of the target, which random logits may choose
    [proposal] = drafter.propose([wish([3, 15, 2], 3)])
    assert len(proposal) == 3 and max(proposal.tokens) < 12


@pytest.fixture
def head_folder(tmp_path: Path) -> Path:
    target = tiny_target()
    save_head(tmp_path / "my head", tiny_head(target), tiny_info(target))
    return tmp_path / "my head"


def test_a_folder_with_a_head_is_a_head(head_folder: Path) -> None:
    target = tiny_target()
    chain = make_drafter(str(head_folder), target)
    assert isinstance(chain, EagleDrafter) and chain.tree is None and chain.taps == (1, 2, 4)
    tree = make_drafter(f"{head_folder}:depth=3,num_nodes=9,min_prob=0.1,window=64", target)
    assert isinstance(tree, EagleDrafter) and tree.tree == TreeShape(depth=3, num_nodes=9) and tree.min_prob == 0.1
    patient = make_drafter(f"{head_folder}:min_prob=0.2", target)
    assert isinstance(patient, EagleDrafter) and patient.tree is None


def native_target(precision: Precision) -> NativeTarget:
    if not is_available("portable"):
        pytest.skip("the native library cannot be built here")
    return NativeTarget.random(TARGET_CONFIG, Placement(device=torch.device("cpu"), precision=precision), seed=5)


def test_the_precision_of_a_head(head_folder: Path) -> None:
    """int8 natively beside an int8 target, else bfloat16; the path says which."""
    cases: list[tuple[Precision, str, str]] = [
        ("int8", "", "native-{} int8"),
        ("bfloat16", "", "native-{} bfloat16"),
        ("int4", "", "native-{} bfloat16"),
        ("int8", ":dtype=bfloat16,depth=3", "native-{} bfloat16"),
        ("bfloat16", ":dtype=int8", "native-{} int8"),
        ("int8", ":dtype=float32", "pytorch float32"),
    ]
    for precision, spec, expected in cases:
        target = native_target(precision)
        drafter = make_drafter(f"{head_folder}{spec}", target)
        assert isinstance(drafter, EagleDrafter) and drafter.path == expected.format(target.context.kernels)
    drafter = make_drafter(str(head_folder), tiny_target())
    assert isinstance(drafter, EagleDrafter) and drafter.path == "pytorch float32"
    with pytest.raises(
        ConfigError, match=r"int4 is not possible for the head .*; allowed: auto, float32, bfloat16, int8"
    ):
        make_drafter(f"{head_folder}:dtype=int4", native_target("int8"))
    with pytest.raises(ConfigError, match="dtype 'int9' is unknown"):
        make_drafter(f"{head_folder}:dtype=int9", native_target("int8"))


def test_merged_takes_a_head(head_folder: Path) -> None:
    target = tiny_target()
    plain = make_drafter(f"merged:{head_folder}", target)
    assert isinstance(plain, MergedDrafter) and plain.shape == TreeShape(depth=5, width=3, num_nodes=16, min_level=0.25)
    small = make_drafter(f"merged:{head_folder}:num_nodes=9", target)
    assert isinstance(small, MergedDrafter) and small.shape == replace(plain.shape, num_nodes=9)


def test_heads_that_came_along_have_names(head_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (head_folder.parent / "no head").mkdir()
    monkeypatch.setattr(shipped, "HEAD_FOLDERS", (head_folder.parent / "missing", head_folder.parent))
    assert shipped.shipped_heads() == {"my head": head_folder}
    drafter = make_drafter("my head:depth=2", tiny_target())
    assert isinstance(drafter, EagleDrafter) and drafter.name == "my head"
    assert isinstance(make_drafter("merged:my head", tiny_target()), MergedDrafter)
    with pytest.raises(ModelNotFound, match=r"one that came along \(my head\)"):
        make_drafter("merged:mine", tiny_target())


def test_auto_is_what_won_on_the_card_of_a_head_that_came_along(
    head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    monkeypatch.setattr(shipped, "HEAD_FOLDERS", (head_folder.parent,))
    config = head_folder / "config.json"
    known = json.loads(config.read_text())
    fingerprint = target.spec.fingerprint
    target.spec = replace(target.spec, path="native-portable float32")
    here, merged = target.spec.precision, "merged:{}:num_nodes=9"
    for made_for, fastest, expected in (
        (fingerprint, {}, "suffix"),
        ("another", {here: merged}, "suffix"),
        (fingerprint, {"int8": merged}, "suffix"),
        (fingerprint, {here: "{}", "int8": merged}, "my head"),
        (fingerprint, {here: merged, "int8": "suffix"}, "merged:my head:num_nodes=9"),
    ):
        card = {"target_fingerprint": made_for, "acceptance": {shipped.FASTEST: fastest}}
        config.write_text(json.dumps({**known, **card}))
        assert resolve_draft("auto", target) == expected
        assert shipped.head_for(target) == ("my head" if made_for == fingerprint else None)
        assert resolve_draft("ngram", target) == "ngram"
    made = make_drafter("auto", target)
    assert isinstance(made, MergedDrafter) and made.shape.num_nodes == 9
    assert isinstance(make_drafter("auto", tiny_target()), SuffixDrafter), "measured beside native passes only"
    monkeypatch.setattr(shipped, "HEAD_FOLDERS", ())
    assert isinstance(make_drafter("auto", target), SuffixDrafter)


def test_drafters_reserve_for_the_longest_chain_that_an_engine_asks_for() -> None:
    assert MOST_DRAFTS == MAX_DRAFT_TOKENS


def test_wrong_uses_of_heads_are_refused(head_folder: Path, tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(ModelNotFound, match="nothing is not the folder of a head"):
        make_drafter("merged:", target)
    with pytest.raises(ModelNotFound, match="is not the folder of a head; give merged:HEAD"):
        make_drafter(f"merged:{tmp_path}", target)
    with pytest.raises(ConfigError, match="unknown option 'widht'; did you mean 'width'"):
        make_drafter(f"{head_folder}:widht=2", target)
    with pytest.raises(ConfigError, match=r"min_prob 2\.0 is not possible"):
        make_drafter(f"{head_folder}:min_prob=2", target)
    with pytest.raises(ConfigError, match=r"int8 is not possible for the head .* beside a target that is not native"):
        make_drafter(str(head_folder), target, dtype="int8")
    with pytest.raises(VocabularyMismatch, match="has 16 tokens"):
        make_drafter(str(head_folder), model())
