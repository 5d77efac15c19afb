"""Labels of conversations beside transformers: text, tokens and the mask of what the assistant says, token by token."""

from __future__ import annotations

import json

import pytest

from xtrain import data
from xtrain.data.token_files import open_token_file
from xtrain.tokenizers import ChatTemplate, find_tokenizer, train_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
transformers = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
pytest.importorskip("jinja2", reason="needs jinja2 (pip install jinja2)")
pytestmark = pytest.mark.on_cpu

# Forms of chat templates in use: ChatML; headers and an end of turn; brackets around a user; and options of Jinja.
_SAY = "{% generation %}{{ m['content'] }}END{% endgeneration %}"
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    + _SAY.replace("END", "{{ '<|im_end|>' }}")
    + "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}",
    "headers": "{{ bos_token }}{% for m in messages %}[{{ m['role'] | upper }}]\n\n{% if m.role == 'assistant' %}"
    + _SAY.replace("END", "{{ eos_token }}")
    + "{% else %}{{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}",
    "brackets": "{%- for m in messages -%}\n  {%- if m['role'] == 'user' -%}\n    [INST] {{ m['content'] }} [/INST]\n"
    "  {%- elif m['role'] == 'assistant' -%}\n    {%- generation -%} {{ m['content'] }}</s>{%- endgeneration -%}\n"
    "  {%- else -%}\n    {{- {'role': m['role'], 'text': m['content']} | tojson -}}\n  {%- endif -%}\n{%- endfor -%}",
}
TALKS = [
    [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}],
    [
        {"role": "system", "content": "Be short, Zw\u00f6lf \u6f22\u5b57."},
        {"role": "user", "content": "  the dog ran home?\n\n"},
        {"role": "assistant", "content": "\u5b57 the dog \U0001f600 ran."},
        {"role": "user", "content": 'and "then"?'},
        {"role": "assistant", "content": " the mat\nsat"},
    ],
    [{"role": "assistant", "content": "the cat sat"}],
    [{"role": "user", "content": "nobody answers"}],
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_labels_are_those_of_transformers(tmp_path, name: str) -> None:
    files = train_tokenizer([b"the cat sat on the mat and the dog ran home; user assistant system " * 20], 320)
    reader = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    reader.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    (tmp_path / "tokenizer.json").write_text(reader.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings["chat_template"] = TEMPLATES[name]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = find_tokenizer(tmp_path)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    data.prepare(tmp_path / "d.jsonl", tmp_path / "x.tokens", ours)
    found = open_token_file(tmp_path / "x.tokens")
    tokens, mask = found.tokens[:].tolist(), found.loss_mask[:].tolist()
    starts = [*found.documents[:].tolist(), len(tokens)]
    template = ChatTemplate(ours.files())
    for i, talk in enumerate(TALKS):
        want = theirs.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert template.render(talk) == theirs.apply_chat_template(talk, tokenize=False)
        assert tokens[starts[i] : starts[i + 1]] == want["input_ids"]
        assert mask[starts[i] : starts[i + 1]] == want["assistant_masks"]
        assert any(mask[starts[i] : starts[i + 1]]) == any(m["role"] == "assistant" for m in talk)
