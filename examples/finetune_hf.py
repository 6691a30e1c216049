"""Fine-tune a Hugging Face decoder and export it; needs `pip install '.[huggingface]'`.

elastic-ring data prepare --source texts/ --tokenizer MODEL_FOLDER --out prepared/
python examples/finetune_hf.py MODEL_FOLDER prepared/manifest.json OUT_FOLDER 100
"""

import sys

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import PreparedTokens
from elastic_ring.integrations.transformers import export, ring_model

folder, manifest, out, steps = *sys.argv[1:4], int(sys.argv[4])
result = ElasticRingTrainer(
    ring_model(folder),
    PreparedTokens.of(manifest, context_tokens=512),
    step_config=StepConfig(steps=steps, global_batch=4, context_tokens=512, param_dtype="bfloat16"),
    optim_config=OptimConfig(peak_lr=1e-4, total_steps=steps),
    scaling_config=ScalingConfig(dp=2, cp=2, spares=1, resources_per_worker={"CPU": 0.25}),
    run_config=RunConfig("finetune"),
).fit()
print(export(result.path, out))
