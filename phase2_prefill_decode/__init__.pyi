from phase0_request.support.checks import ConfigError as ConfigError
from phase2_prefill_decode.loading.config import ModelConfig as ModelConfig
