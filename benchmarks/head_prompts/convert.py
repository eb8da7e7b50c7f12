"""From a public source's own files to prompt rows.

A converter yields a row for everything that the source holds; which of them belong to the prompt file the table says.
Where a choice was made that the file cannot tell (which task sentence, which of a paragraph's questions), it yields
every candidate, and the row's mark decides. The task sentences are this project's own.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.sources import read_jsonl

__all__ = ["CONVERTERS", "candidates"]

Row = dict[str, Any]
Files = Mapping[str, bytes]
Converter = Callable[[Files], Iterator[Row]]

_ABSTRACT_TASKS = (
    "Summarise this abstract for a general audience in three sentences.",
    "Write a title and a two-sentence summary for this paper.",
    "List the main contribution, the method and the result as three bullet points.",
    "TL;DR in one sentence:",
)
_EXECUTION_TASKS = (
    "Without running it, predict the output of `{call}` and explain your reasoning.",
    "What does `{call}` return? Work through the execution step by step, then give the result.",
    "Trace `{call}` line by line and state the final return value.",
)
_CLASS_TASK = (
    "Implement every method of the following Python class so that it matches its docstrings. Return the complete class."
)
_LANGUAGES = {
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "ro": "Romanian",
    "ru": "Russian",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
_END_OF_TEXT = "<|endoftext|>"


def candidates(converter: str, files: Files) -> Iterator[Row]:
    """Every row that the source's files may give; of each also the form without outer white space.

    Args:
        converter: one of ``CONVERTERS``.
        files: content of each of the source's files, by path in its repository.
    """
    for row in CONVERTERS[converter](files):
        yield row
        content, reference = row["messages"][0]["content"], row.get("reference")
        trimmed = None if reference is None else reference.strip()
        for text, answer in ((content.strip(), reference), (content, trimmed), (content.strip(), trimmed)):
            if (text, answer) != (content, reference):
                yield _row(row["id"], row["category"], text, answer)


def _row(name: str, category: str, content: str, reference: str | None = None) -> Row:
    """A row that lacks its ``source``, which the table adds."""
    row: Row = {"id": name, "category": category, "messages": [{"role": "user", "content": content}]}
    if reference is not None:
        row["reference"] = reference
    return row


def _lines(files: Files) -> list[Row]:
    return [row for path, data in files.items() for row in read_jsonl(data, path)]


def _json(files: Files) -> Any:
    (data,) = files.values()
    return json.loads(data)


def _joined(instruction: str, extra: str) -> str:
    return f"{instruction}\n\n{extra}" if extra.strip() else instruction


def gsm8k(files: Files) -> Iterator[Row]:
    """``{question, answer}`` a line."""
    for number, raw in enumerate(_lines(files)):
        yield _row(f"gsm8k_train/{number}", "math", raw["question"], raw["answer"])


def svamp(files: Files) -> Iterator[Row]:
    """A list of ``{ID, Body, Question, Answer}``; many bodies lack their full stop."""
    for raw in _json(files):
        body = raw["Body"].strip()
        for start in (body, body + "."):
            yield _row(f"svamp/{raw['ID']}", "math", f"{start} {raw['Question']}", str(raw["Answer"]))


def aqua(files: Files) -> Iterator[Row]:
    """``{question, options, correct}`` a line."""
    for number, raw in enumerate(_lines(files)):
        options = " ".join(raw["options"])
        content = f"{raw['question']}\n\nOptions: {options}\nExplain your reasoning, then give the letter."
        yield _row(f"aqua/{number}", "math", content, raw["correct"])


def theoremqa(files: Files) -> Iterator[Row]:
    """A list of ``{id, Question, Answer}``."""
    for raw in _json(files):
        yield _row(f"theoremqa/{raw['id']}", "math/hard", raw["Question"], str(raw["Answer"]))


def mbpp(files: Files) -> Iterator[Row]:
    """``{task_id, text, code, test_list}`` a line, in some copies inside ``doc``; line ends are DOS's."""
    for raw in _lines(files):
        task = raw.get("doc", raw)
        test = task["test_list"][0].replace("\r\n", "\n")
        text, code = task["text"].replace("\r\n", "\n"), task["code"].replace("\r\n", "\n")
        yield _row(
            f"mbpp/{task['task_id']}", "code/python", f"{text}\n\nYour code should pass this test:\n\n{test}", code
        )


def cruxeval(files: Files) -> Iterator[Row]:
    """``{id, code, input, output}`` a line."""
    for raw in _lines(files):
        for task in _EXECUTION_TASKS:
            content = f"```python\n{raw['code']}\n```\n\n{task.format(call='f(' + raw['input'] + ')')}"
            yield _row(f"cruxeval/{raw['id']}", "code/execution", content, raw["output"])


def classeval(files: Files) -> Iterator[Row]:
    """A list of ``{task_id, skeleton, solution_code}``."""
    for raw in _json(files):
        content = f"{_CLASS_TASK}\n\n```python\n{raw['skeleton'].strip()}\n```"
        yield _row(f"classeval/{raw['task_id']}", "code/class", content, raw["solution_code"])


def oasst(files: Files) -> Iterator[Row]:
    """``{prompt, completion}`` a line; chats come first, commits after them."""
    for number, raw in enumerate(_lines(files)):
        yield _row(f"oasst/{number}", "chat", raw["prompt"])


def commitpackft(files: Files) -> Iterator[Row]:
    """The same lines as :func:`oasst`: a commit's subject, then the old file."""
    for number, raw in enumerate(_lines(files)):
        subject, _, old = raw["prompt"].partition("\n")
        task = f"Apply this change to the file and return the complete updated file.\n\nChange: {subject}"
        yield _row(f"commitpackft/{number}", "code/edit", f"{task}\n\n```\n{old.rstrip()}\n```")


def _gpteacher(part: str, category: str) -> Converter:
    """A list of ``{instruction, input}``; of two files that begin alike both are candidates."""

    def convert(files: Files) -> Iterator[Row]:
        for data in files.values():
            for number, raw in enumerate(json.loads(data)):
                yield _row(f"gpteacher_{part}/{number}", category, _joined(raw["instruction"], raw["input"]))

    return convert


def awesome_prompts(files: Files) -> Iterator[Row]:
    """A CSV file with ``prompt`` and ``type``; the number counts all rows, or those of type TEXT."""
    (data,) = files.values()
    rows = list(csv.DictReader(io.StringIO(data.decode("utf-8"), newline="")))
    texts = [raw for raw in rows if raw.get("type", "TEXT") == "TEXT"]
    for group in (rows, texts):
        for number, raw in enumerate(group):
            yield _row(f"awesome_prompts/{number}", "chat/persona", raw["prompt"])


def ifeval(files: Files) -> Iterator[Row]:
    """``{key, prompt}`` a line."""
    for raw in _lines(files):
        yield _row(f"ifeval_rest/{raw['key']}", "instruction_following", raw["prompt"])


def vicuna(files: Files) -> Iterator[Row]:
    """``{question_id, turns}`` a line."""
    for raw in _lines(files):
        yield _row(f"vicuna_bench/{raw['question_id']}", "chat", raw["turns"][0])


def _self_instruct(prefix: str, cut: str) -> Converter:
    """``{id, instruction, instances}`` a line; the first instance counts."""

    def convert(files: Files) -> Iterator[Row]:
        for raw in _lines(files):
            first = raw["instances"][0]
            name = prefix + raw["id"].removeprefix(cut)
            yield _row(name, "instruction_following", _joined(raw["instruction"], first["input"]), first["output"])

    return convert


def _t0(category: str) -> Converter:
    """``{prompt, completion}`` a line, one file a template."""

    def convert(files: Files) -> Iterator[Row]:
        for path, data in files.items():
            template = path.rsplit("/", 1)[-1].removesuffix(".jsonl")
            for number, raw in enumerate(read_jsonl(data, path)):
                answer = raw["completion"].removesuffix(_END_OF_TEXT)
                yield _row(f"t0/{template}_{number}", category, raw["prompt"], answer)

    return convert


def scitldr(files: Files) -> Iterator[Row]:
    """``{paper_id, source, target}`` a line: sentences of an abstract, and summaries."""
    for raw in _lines(files):
        for task in _ABSTRACT_TASKS:
            content = f"{' '.join(raw['source'])}\n\n{task}"
            yield _row(f"scitldr/{raw['paper_id']}", "summarization/abstract", content, raw["target"][0])


def pubmedqa(files: Files) -> Iterator[Row]:
    """An object of ``{QUESTION, CONTEXTS, LABELS, LONG_ANSWER}`` by PubMed id."""
    for name, raw in _json(files).items():
        labelled = zip(raw["LABELS"], raw["CONTEXTS"], strict=True)
        passages = [f"[{i}] ({label.title()}) {text}" for i, (label, text) in enumerate(labelled, start=1)]
        task = "Use only the passages below to answer the question. Cite passage numbers."
        content = "\n\n".join([task, *passages, f"Question: {raw['QUESTION']}"])
        yield _row(f"pubmedqa/{name}", "rag", content, raw["LONG_ANSWER"])


def xquad(files: Files) -> Iterator[Row]:
    """``xquad.LANGUAGE.json`` in SQuAD's form: the same paragraphs in every language, in one order."""
    paragraphs = {path.split(".")[-2]: _paragraphs(json.loads(data)) for path, data in files.items()}
    for language, own in paragraphs.items():
        for number, paragraph in enumerate(own):
            yield from _questions(language, number, paragraph)
        for other in paragraphs.keys() - {language}:
            if "en" in (language, other):
                yield from _translations(language, other, paragraphs)


def _paragraphs(data: Row) -> list[Row]:
    return [paragraph for article in data["data"] for paragraph in article["paragraphs"]]


def _questions(language: str, number: int, paragraph: Row) -> Iterator[Row]:
    english = language == "en"
    for raw in paragraph["qas"]:
        asked = f"Question: {raw['question']}\nAnswer in a full sentence and quote the supporting text."
        content = f"{paragraph['context']}\n\n{asked if english else raw['question']}"
        category = "rag" if english else "rag/multilingual"
        yield _row(f"xquad_qa/{language}_{number}", category, content, raw["answers"][0]["text"])


def _translations(source: str, target: str, paragraphs: Mapping[str, list[Row]]) -> Iterator[Row]:
    task = f"Translate the text above from {_LANGUAGES[source]} to {_LANGUAGES[target]}."
    for number, (old, new) in enumerate(zip(paragraphs[source], paragraphs[target], strict=True)):
        content = f"{old['context']}\n\n{task}"
        yield _row(f"xquad_translate/{source}_{target}_{number}", "translation", content, new["context"])


CONVERTERS: dict[str, Converter] = {
    "gsm8k": gsm8k,
    "svamp": svamp,
    "aqua": aqua,
    "theoremqa": theoremqa,
    "mbpp": mbpp,
    "cruxeval": cruxeval,
    "classeval": classeval,
    "oasst": oasst,
    "commitpackft": commitpackft,
    "gpteacher_codegen": _gpteacher("codegen", "code/instruct"),
    "gpteacher_roleplay": _gpteacher("roleplay", "chat/roleplay"),
    "gpteacher_toolformer": _gpteacher("toolformer", "tool_call/inline"),
    "awesome_prompts": awesome_prompts,
    "ifeval": ifeval,
    "vicuna": vicuna,
    "self_instruct_seed": _self_instruct("self_instruct_seed/", ""),
    "user_oriented": _self_instruct("user_oriented/", "user_oriented_task_"),
    "t0_reading": _t0("reading"),
    "t0_instructions": _t0("instruction_following"),
    "scitldr": scitldr,
    "pubmedqa": pubmedqa,
    "xquad": xquad,
}
"""By the name that the table gives."""
