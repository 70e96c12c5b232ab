"""Tiny models, a tokenizer and texts for the packages that use models of transformers."""

from pathlib import Path

import pytest
import torch

from kalmix.models import KalmixConfig, KalmixForCausalLM

WORDS = ["the", "a", "cat", "dog", "bird", "fish", "sat", "ran", "flew", "swam", "on", "under", "mat", "tree", "house"]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<user> ' + message['content'] + ' ' }}"
    "{% else %}{{ '<assistant> ' }}{% generation %}{{ message['content'] + ' <eos> ' }}{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
LAYERS = {"kla": ["kla", "kla"], "hybrid": ["gated-deltanet", "attention"]}


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave the folder out of `make test`: importing these packages takes many seconds."""
    return True if config.option.markexpr == "not slow" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder as slow: `make test-all` runs them, with the packages of the extra `clients`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tokenizer():
    """Tokenizer of whole words, made here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    made = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    made.chat_template = CHAT_TEMPLATE
    return made


def build(layers: list, tokenizer, **options) -> KalmixForCausalLM:
    """Build a small model for the tokenizer."""
    torch.manual_seed(0)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return KalmixForCausalLM(
        KalmixConfig(vocab_size=len(tokenizer), hidden_size=32, layers=layers, **{**ids, **options})
    ).eval()


@pytest.fixture(params=LAYERS)
def model(request: pytest.FixtureRequest, tokenizer) -> KalmixForCausalLM:
    return build(LAYERS[request.param], tokenizer)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return random sentences of 4 to 12 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator)) for length in lengths]
