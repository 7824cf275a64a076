"""The tables of a sweep: four folders of Parquet files, one file a part, version 1.

``prompts``: one row a prompt, also those that failed (``error`` says why, and what follows it is empty).

==================  ================  =========================================================================
column              type              meaning
==================  ================  =========================================================================
prompt              int64             number of the prompt, from 0
line                int64             its line in the file, from 1; empty for a list
text                string            the prompt; empty for token ids
type                string            its group, "" for none
error_kind          string            ``unreadable``, ``prompt``, ``target``, ``model`` or ``memory``; else empty
error               string            the reason
tokens              list of int32     the prompt's ids as the model saw them, BOS included
str_tokens          list of string    the same as text
position            int32             the predicting position, from 0
target              string            what scores are about, in quotes
target_ids          list of int32     its token ids
target_log_prob     float64           the model's own value of the target, nats
target_rank         int32             of the target's best token among all tokens, from 1
predicted           string            the model's first choice
predicted_id        int32             its id
predicted_log_prob  float64           its log-probability, nats
n_mlp, n_attn       int64             how many neurons of each kind the prompt has
warning             string            what a query score's denominator is warned of; else empty
==================  ================  =========================================================================

``layers``: ``prompt, layer``, and the scores ``attn, mlp`` (float32, nats). ``heads``: ``prompt, layer, head`` and
``score``.

``neurons``: one row a (prompt, neuron), best first: ``prompt``; ``role`` (``value`` or ``query``); ``kind`` (``mlp``
or ``attn``); ``rank`` from 1; ``layer``; ``neuron`` (MLP), or ``head, dim, source`` (attention); ``score`` (float32,
nats); ``coefficient`` (float32); ``source_token`` (attention); ``pos``, where a query neuron contributes most.

The metadata of every file holds the version, its table, its part, and the sweep it belongs to: the hash of the
manifest's settings. The manifest is strict JSON under the same version.
"""

from typing import Any

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]

SCHEMA = "tl_neuron_attr.sweep"
SCHEMA_VERSION = 1
# How many attention value neurons query neurons are those of, as in the paper.
N_QUERIED = 30

_INTS, _STRINGS = pa.list_(pa.int32()), pa.list_(pa.string())
_NAME = pa.dictionary(pa.int8(), pa.string())

TABLES: dict[str, Any] = {
    # In the order of writing: a part is there once its prompts are.
    "layers": pa.schema(
        [("prompt", pa.int64()), ("layer", pa.int32()), ("attn", pa.float32()), ("mlp", pa.float32())]
    ),
    "heads": pa.schema(
        [("prompt", pa.int64()), ("layer", pa.int32()), ("head", pa.int32()), ("score", pa.float32())]
    ),
    "neurons": pa.schema(
        [
            ("prompt", pa.int64()),
            ("role", _NAME),
            ("kind", _NAME),
            ("rank", pa.int32()),
            ("layer", pa.int32()),
            ("neuron", pa.int32()),
            ("head", pa.int32()),
            ("dim", pa.int32()),
            ("source", pa.int32()),
            ("score", pa.float32()),
            ("coefficient", pa.float32()),
            ("source_token", pa.string()),
            ("pos", pa.int32()),
        ]
    ),
    "prompts": pa.schema(
        [
            ("prompt", pa.int64()),
            ("line", pa.int64()),
            ("text", pa.string()),
            ("type", pa.string()),
            ("error_kind", pa.string()),
            ("error", pa.string()),
            ("tokens", _INTS),
            ("str_tokens", _STRINGS),
            ("position", pa.int32()),
            ("target", pa.string()),
            ("target_ids", _INTS),
            ("target_log_prob", pa.float64()),
            ("target_rank", pa.int32()),
            ("predicted", pa.string()),
            ("predicted_id", pa.int32()),
            ("predicted_log_prob", pa.float64()),
            ("n_mlp", pa.int64()),
            ("n_attn", pa.int64()),
            ("warning", pa.string()),
        ]
    ),
}
