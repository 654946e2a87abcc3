// What there is to see in each chapter's scene, what a reader can set in it, and the rest of it. The object is JSON: the book
// is packed with the run that each scene begins with.

export const SCENES = {
  "0": {
    "title": "A batch that changes",
    "look": "A static batch keeps its places to the end of its longest answer. Choose continuous: which request takes a place that becomes free, and how many steps does that save?",
    "set": {"batching": "static", "requests": 12, "answer": 24, "running": 4},
    "rest": {"every": 0, "prompt": 12, "pages": 96, "cache": "paged"}
  },
  "1": {
    "title": "A pool of pages",
    "look": "A request takes a page when its tokens need one, and gives all of them back at its end. What happens when no page is free? Try half as many pages, then twice as many.",
    "set": {"pages": 40, "page_size": 16, "requests": 14, "prompt": 60, "answer": 40},
    "rest": {"every": 3, "cache": "paged", "running": 16}
  },
  "2": {
    "title": "Prefill, then decodes",
    "look": "The first step of a batch computes all of its prompts, each later one a token for every request. Let eight run at once: how much longer does each step take, and how many steps are needed?",
    "set": {"requests": 8, "prompt": 60, "answer": 30, "running": 4},
    "rest": {"every": 0, "pages": 96, "cache": "paged", "batching": "static"}
  },
  "3": {
    "title": "A long prompt among decodes",
    "look": "A long prompt arrives while others write their answers. It is cut into chunks, so that each step still has a token for them. Set both limits to 512: what becomes of the ITL, the time between two tokens?",
    "set": {"budget": 64, "chunk": 32, "long": 480, "requests": 8},
    "rest": {"every": 1, "prompt": 20, "answer": 50, "pages": 96, "cache": "paged", "running": 16}
  },
  "4": {
    "title": "A tree of prefixes",
    "look": "The requests of a group begin with the same tokens. The first of them computes these; the others find their pages in the tree. Share nothing: how much time and how many pages does that cost? With few pages, cached ones make way: which?",
    "set": {"shared": 96, "groups": 3, "pages": 48, "requests": 18, "cache": "prefix"},
    "rest": {"every": 3, "prompt": 30, "answer": 16, "running": 4, "budget": 128, "chunk": 128}
  },
  "5": {
    "title": "Admission, preemption, fairness",
    "look": "In the middle a second client, the tenant “greedy”, sends eight requests at once: whose turn is it then? With so few pages requests are preempted. Who, for whom, and does it go away with 120 pages?",
    "set": {"policy": "fcfs", "pages": 40, "requests": 16, "greedy": 8, "budget": 64, "running": 12},
    "rest": {"every": 2, "prompt": 50, "answer": 40, "shared": 32}
  },
  "recorded": {
    "title": "A recorded run of the server",
    "look": "The bundled model on a CPU: chats that share instructions, two long prompts, a client that leaves, and a pool that is too small.",
    "set": {}
  }
};
