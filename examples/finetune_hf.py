"""Fine-tune a Hugging Face decoder on token shards, then export it. Needs `pip install 'elastic-ring[huggingface]'`.

python examples/finetune_hf.py MODEL_FOLDER SHARDS OUT_FOLDER 100
"""

import sys

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import TokenShards
from elastic_ring.integrations.transformers import export, ring_model

folder, shards, out, steps = *sys.argv[1:4], int(sys.argv[4])
model = ring_model(folder)
result = ElasticRingTrainer(
    model,
    TokenShards(512, shards, vocab_size=model.vocab_size, end_of_document=model.config.eos_token_id),
    step_config=StepConfig(steps=steps, global_batch=4, context_tokens=512, param_dtype="bfloat16"),
    optim_config=OptimConfig(peak_lr=1e-4, total_steps=steps),
    scaling_config=ScalingConfig(dp=2, cp=2, spares=1, resources_per_worker={"CPU": 0.25}),
    run_config=RunConfig("finetune"),
).fit()
print(export(result.path, out))
