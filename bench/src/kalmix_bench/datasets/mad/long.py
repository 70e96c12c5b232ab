"""Long-context recall of Kalman Linear Attention (Table 9, "CR (hard)"): 2,048 tokens, 256 ids, 12,800 and 1,280 rows.

The generator is an inference. The paper calls the task MQAR after Zoology, whose code does not accept fewer ids than
tokens. Its sizes and its name match MAD's in-context recall, which this module uses. The paper does not state the
number of pairs: here there are 1,024, with up to 128 keys, and about 896 tokens of a row are scored.
"""

from dataclasses import replace

from kalmix_bench.datasets.mad.recall import IN_CONTEXT
from kalmix_bench.datasets.mad.settings import MadSettings

LONG = replace(
    IN_CONTEXT,
    name="recall/long",
    baseline=MadSettings(vocab_size=256, seq_len=2048),
    published=replace(
        IN_CONTEXT.published,
        source="Kalman Linear Attention, Table 9; an inference, see kalmix_bench.datasets.mad.long",
        difficulties=(),
    ),
)
