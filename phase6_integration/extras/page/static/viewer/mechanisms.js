// What each mechanism is, and where the source does it. The object is JSON: a test checks that all of it exists.

export const MECHANISMS = {
  "arrival": {
    "title": "Arrival", "what": "A request joins the waiting queue of its tenant.",
    "file": "phase5_continuous/admission.py", "name": "Admission.add", "chapter": "chapters/05_continuous.md", "section": "Admission"
  },
  "admission": {
    "title": "Admission", "what": "A waiting request starts when the step has a token left for it and the pool can hold all its tokens with the watermark free.",
    "file": "phase5_continuous/admission.py", "name": "Admission.admit", "chapter": "chapters/05_continuous.md", "section": "Admission"
  },
  "held": {
    "title": "Waiting", "what": "The next in turn does not fit: no tokens, places or pages are left, or another request is computing its prefix.",
    "file": "phase5_continuous/running.py", "name": "RunningSet.allocate", "chapter": "chapters/05_continuous.md", "section": "Admission"
  },
  "preemption": {
    "title": "Preemption", "what": "When a decode needs a page and none is free, the request last in rank loses its pages. Its tokens are kept, and prefilled again when it resumes.",
    "file": "phase5_continuous/running.py", "name": "RunningSet.allocate_slots", "chapter": "chapters/05_continuous.md", "section": "Preemption"
  },
  "eviction": {
    "title": "Eviction", "what": "Cached pages that no request uses leave the tree, the least recently used leaf first, from its end.",
    "file": "phase4_radix/radix_tree.py", "name": "RadixTree.evict", "chapter": "chapters/04_radix.md", "section": "Evict"
  },
  "prefix": {
    "title": "Prefix match", "what": "A page table starts with the longest cached prefix, in whole pages, and locks it.",
    "file": "phase4_radix/prefix_cache.py", "name": "PrefixCache.attach", "chapter": "chapters/04_radix.md", "section": "Attach"
  },
  "publish": {
    "title": "Publish", "what": "A page joins the tree once all its tokens are computed. From then on it is read-only, and any request may share it.",
    "file": "phase4_radix/prefix_cache.py", "name": "PrefixCache.publish", "chapter": "chapters/04_radix.md", "section": "Publish, and the duplicate race"
  },
  "duplicate": {
    "title": "Duplicate", "what": "Two requests computed the same tokens at once: the second switches to the tree's pages and frees its own.",
    "file": "phase4_radix/prefix_cache.py", "name": "PrefixCache.publish", "chapter": "chapters/04_radix.md", "section": "Publish, and the duplicate race"
  },
  "chunk": {
    "title": "Chunked prefill", "what": "A long prompt is computed in chunks, so that the decodes of others go on in the same steps.",
    "file": "phase3_chunked_prefill/chunker.py", "name": "Chunker.schedule", "chapter": "chapters/03_chunked_prefill.md", "section": "Who gets the budget"
  },
  "decode": {
    "title": "Decode", "what": "Each running request computes its newest token and draws the next. One read of the weights serves them all.",
    "file": "phase5_continuous/scheduler.py", "name": "Scheduler.plan", "chapter": "chapters/05_continuous.md", "section": "A step is planned"
  },
  "draft": {
    "title": "Speculation", "what": "A step computes a draft after the newest token. It is accepted as far as the drawn tokens are the drafted ones.",
    "file": "phase5_continuous/scheduler.py", "name": "Scheduler.commit", "chapter": "chapters/11_speculation.md", "section": "The idea"
  },
  "experts": {
    "title": "Experts", "what": "A router chooses a few of many MLPs for each token. A step reads the weights of those that some token chose: the more tokens, the more experts.",
    "file": "phase2_prefill_decode/extras/families/experts.py", "name": "RoutedExperts", "chapter": "chapters/10_models.md", "section": "Experts"
  },
  "finish": {
    "title": "Finish", "what": "The request leaves, and its pages are freed. Those in the tree stay cached.",
    "file": "phase4_radix/prefix_cache.py", "name": "PrefixCache.release", "chapter": "chapters/05_continuous.md", "section": "A step is committed"
  },
  "page": {
    "title": "Pages", "what": "Keys and values live in pages of a fixed number of tokens. A page table lists those of a request, in any order.",
    "file": "phase1_kv_pool/allocator.py", "name": "PageAllocator", "chapter": "chapters/01_kv_pool.md", "section": "The idea"
  },
  "budget": {
    "title": "Token budget", "what": "A step computes at most so many tokens: decodes first, prompts with what is left.",
    "file": "phase3_chunked_prefill/budget.py", "name": "TokenBudget", "chapter": "chapters/03_chunked_prefill.md", "section": "A budget for the step"
  },
  "policy": {
    "title": "Policy", "what": "The order in which waiting requests are admitted. fcfs: first come, first served.",
    "file": "phase5_continuous/policies.py", "name": "FirstComeFirstServed", "chapter": "chapters/05_continuous.md", "section": "Policies"
  },
  "tenant": {
    "title": "Tenant", "what": "The client that a request counts for: with one key for each, or one address. Tenants take turns, by the tokens that they have had.",
    "file": "phase5_continuous/extras/fairness.py", "name": "FairShare", "chapter": "chapters/05_continuous.md", "section": "Fairness between clients"
  },
  "throughput": {
    "title": "Throughput", "what": "Tokens a second, over all requests, in the last 16 steps.",
    "file": "phase0_request/request.py", "name": "RequestTimes", "chapter": "chapters/00_request.md", "section": "What to measure"
  },
  "ttft": {
    "title": "TTFT, time to first token", "what": "From the arrival of a request to its first token: waiting and prefill.",
    "file": "phase0_request/request.py", "name": "RequestTimes.ttft", "chapter": "chapters/00_request.md", "section": "What to measure"
  },
  "itl": {
    "title": "ITL, inter-token latency", "what": "From one token of a request to its next, as the mean over those that drew one in the step.",
    "file": "phase0_request/request.py", "name": "RequestTimes.itl", "chapter": "chapters/00_request.md", "section": "What to measure"
  },
  "hits": {
    "title": "Hit rate", "what": "The share of the admitted tokens that was cached, since the record began.",
    "file": "phase4_radix/prefix_cache.py", "name": "Counts.hit_rate", "chapter": "chapters/04_radix.md", "section": "The cache"
  },
  "queue": {
    "title": "Queue", "what": "Requests that wait: not admitted yet, or preempted.",
    "file": "phase5_continuous/admission.py", "name": "Admission", "chapter": "chapters/05_continuous.md", "section": "Admission"
  },
  "tree": {
    "title": "Radix tree", "what": "Each cached prefix is stored once, in whole pages; requests that begin alike share its pages.",
    "file": "phase4_radix/radix_tree.py", "name": "RadixTree", "chapter": "chapters/04_radix.md", "section": "The tree"
  }
};
