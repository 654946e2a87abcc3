"""Questions about serving, which the bundled model can answer, with answers for a mock model."""

QUESTIONS = {
    "What is a KV cache?": "A KV cache keeps the keys and values of earlier tokens, so they are computed only once.",
    "Why is decode slow?": "Every step of decode reads all the weights and the whole cache to make one token.",
    "What is paging?": "Paging splits the cache into pages of equal size, so a request needs no contiguous memory.",
    "What is a page table?": "A page table lists the pages of a request in the order of its tokens.",
    "How does preemption work?": "Preemption frees the pages of a running request, and its tokens are computed again.",
    "What is TTFT?": "TTFT is the time from the arrival of a request to its first token.",
    "What is a scheduler?": "A scheduler decides which requests are in the next step, and with how many tokens.",
    "What is prefill?": "Prefill computes the keys and values of all tokens of a prompt at once.",
    "What is batching?": "Batching runs many requests in one step, so that they share one read of the weights.",
    "What is a token?": "A token is a piece of text, often a word, that the model reads or writes as one number.",
    "What is a radix tree?": "A radix tree stores the prefixes of prompts, so that requests can share their pages.",
    "What is goodput?": "Goodput counts the requests per second that met their latency targets.",
}
