from phase3_chunked_prefill.budget import TokenBudget as TokenBudget
from phase3_chunked_prefill.chunker import Chunker as Chunker
