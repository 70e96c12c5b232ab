"""Long-context recall, Table 9 of Kalman Linear Attention ("CR (hard)"): 2,048 tokens, 256 ids, 12,800 and 1,280 rows.

Which generator made its rows is an inference: the paper calls it MQAR after Zoology, whose code refuses fewer ids than
tokens, while the sizes and the name are those of MAD's in-context recall, which it is here. The paper does not state
how many pairs there are; here 1,024, of up to 128 keys, and some 896 tokens of a row are scored.
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
