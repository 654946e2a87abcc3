"""What the bundled model is made of: its corpus, its tokenizer, its training, and the examination of what it learned.

python -m chapters.tiny_chat.tokenizer   # trains the tokenizer on the corpus; the same bytes every time
python -m chapters.tiny_chat.train       # trains the model, in less than an hour on two cores
python -m chapters.tiny_chat.judge       # asks it questions, and judges the answers
"""
