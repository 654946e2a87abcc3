"""Ray's own PrefixCacheAffinityRouter for these replicas: it matches text, and a request here is tokens.

So each token becomes a character, which is kinder to it than text: its matches end where tokens do.
"""

import msgspec
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest

from phase6_integration.process.messages import EngineRequest


class TokensAsText(PrefixCacheAffinityRouter):
    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        if pending_request.metadata.call_method != "generate":
            return ""
        (prompt,) = msgspec.msgpack.decode(pending_request.args[1], type=EngineRequest).prompts
        return "".join(map(chr, prompt))
