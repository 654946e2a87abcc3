"""The bundled corpus: facts about serving, facts of the world and small talk, and the tokenizer trained on them."""
