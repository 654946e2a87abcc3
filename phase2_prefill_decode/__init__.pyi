from phase2_prefill_decode.config import ModelConfig as ModelConfig
from phase2_prefill_decode.fields import ConfigError as ConfigError
