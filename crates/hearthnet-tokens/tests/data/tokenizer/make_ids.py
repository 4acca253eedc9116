#!/usr/bin/env python3
"""Writes ids.json: token ids by llama.cpp's own tokenizer, see README.md.

usage: make_ids.py MODEL.gguf path/to/llama-tokenize > ids.json
"""
import ast
import json
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter

# The same vocabulary under the names of other pre-tokenisers.
OTHER_PRES = ["gpt-2", "llama-bpe", "qwen2", "default"]

WRITTEN = [
    "", " ", "  ", "   ", " " * 7, " " * 64, " " * 300, "\n", "\n\n", "\n\n\n\n", "\r\n", "\r\n\r\n", "\r", "\t", "\t\t\t",
    "\t" * 40, " \n", "\n ", " \n ", "  \n  \n", "\n \n \n", " \t \t\n\t ", "\u00a0", "a\u00a0b", "a \u00a0 b", "\u3000", "全角\u3000空白",
    "\u2003em\u2003space", "\u200bzero\u200bwidth", "\u0085next line\u0085", "\u2028line\u2029paragraph", "a\x0bb\x0cc", "\ufeffbom",
    "Hello", " Hello", "Hello ", "Hello world", "Hello  world", "Hello   world!", "hello, world.", "HELLO WORLD", "HeLLo WoRLd",
    "The quick brown fox jumps over the lazy dog.", "The capital of France is Paris.\nThe capital of Italy is Rome.",
    "It's", "it's they'll we've I'm you're he'd can't", "IT'S THEY'LL WE'VE I'M YOU'RE HE'D CAN'T", "'s 't 're 've 'm 'll 'd",
    "'S 'T 'RE 'Ve 'M 'lL 'D", "' s ' t", "''s", "'''", "rock 'n' roll", "l'été d'Été", "it’s they’ll", "'\u017f a'\u017f", "x'sy", "'st 'rest", "don't''ll",
    "0", "7", "42", "123", "1234", "12345", "1234567890", "3.14159", "1,000,000", "1e-10", "0x1F", "v2.0.1", "a1b2c3", "1st 2nd 3rd", " 1 22 333 4444 55555",
    "2024-06-07T08:09:10Z", "+49 (0)30 123456", "①②③", "Ⅷ ⅷ", "½ ¾ ⅓", "²³¹", "٠١٢٣٤", "१२३", "１２３", "𝟘𝟙𝟚", "10㎏", "x²+y²=z²",
    "!", "!!!", "?!", "...", "…", "()[]{}<>", "a.b.c", "e.g. i.e. etc.", "@user #tag $5 %d ^x &y *z", "~`|\\/", "--flag=value", "->=>==!=<=>=", "/* c */ // d",
    "_snake_case_ and camelCase and kebab-case", "http://example.com/path?q=1&r=2#frag", "user@example.com", "C:\\Users\\name", "/usr/local/bin", "a\\nb\\tc", "%20%3D", "€5 £6 ¥7 ₹8", "©®™", "«guillemets» „quotes“ “curly” ‘single’", "—en–dash—", "• bullet · dot", "½¼", "±×÷≠≤≥∞√∑∫", "→←↑↓⇒", "α≤β",
    "def f(x):\n    return x + 1\n", "def f(x):\n\tif x:\n\t\treturn x\n\n\n", "for (int i = 0; i < 10; ++i) {\n    printf(\"%d\\n\", i);\n}\n",
    "fn main() {\n    println!(\"{}\", 1 + 2);\n}\n", "SELECT * FROM t WHERE a = 'b' AND c <> 3;", "{\"key\": [1, 2.5, null, true, \"v\"]}", "<html>\n  <body class=\"x\">&amp;</body>\n</html>", "#!/bin/sh\nset -eu\necho \"$HOME\" | sed 's/a/b/g'\n", "import os, sys\r\nprint(os.path)\r\n", "x  =  1;    // comment\n        y = 2;", "| a | b |\n|---|---|\n| 1 | 2 |\n", "- [ ] todo\n- [x] done\n\n```python\npass\n```\n", "\\begin{align}\n  E &= mc^2 \\\\\n\\end{align}", "if(!a&&b||c)?d:e;", "a=b+c-d*e/f%g", "0b1010_1100", "'\\u00e9'", "r'\\d+'", "\"\"\"doc\"\"\"", "let s = 'it''s';",
    "é", "e\u0301", "ñ n\u0303", "Å A\u030a Å", "a\u0301\u0302\u0303\u0304\u0305", "Zürich Straße Größe", "naïve café résumé", "Ærøskøbing Łódź Čeština Türkçe Ağrı", "ﬁ ﬂ ﬀ", "Ǆ ǅ ǆ", "ẞß", "ŉ",
    "Привет, мир! Как дела?", "Ελληνικά, τί κάνεις;", "שלום עולם", "שָׁלוֹם", "مرحبا بالعالم", "السَّلَامُ عَلَيْكُمْ", "فارسی می‌شود", "اردو", "हिन्दी में नमस्ते दुनिया", "क्षत्रिय ज्ञान श्री", "বাংলা ভাষা", "தமிழ் மொழி", "తెలుగు", "ไทยไม่มีวรรค", "ລາວ", "မြန်မာ", "ខ្មែរ", "ქართული", "Հայերեն", "አማርኛ", "ᏣᎳᎩ", "བོད་ཡིག", "ᠮᠣᠩᠭᠣᠯ",
    "中文字符", "你好，世界！", "繁體中文測試。", "日本語のテキスト、カタカナとひらがな。", "ｶﾀｶﾅ", "한국어 텍스트입니다.", "ㄱㄴㄷ 한", "中a文1字 b符", "漢字かな交じり文。100円", "𠀀𠀁𪜶", "𡨸喃", "〇一二三", "「引用」『二重』【括弧】", "～〜ー—",
    "😀", "😀😀😀", " 😀 ", "a😀b", "👍🏽", "👨‍👩‍👧‍👦", "👩🏾‍💻 codes", "🏳️‍🌈🏴‍☠️", "🇩🇪🇯🇵🇺🇳", "❤️ ❤", "1️⃣2️⃣", "☀️☁️", "🫠🫡🪿", "👋 Hello 🌍!", "(╯°□°)╯︵ ┻━┻", "¯\\_(ツ)_/¯", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "\x00", "a\x00b", "\x01\x02\x03", "a\x04b", "!\x04!", "\x04\x04", "ab\x06cd", "\x13\x14\x16\x1d", "x\x1dy\x1d", "\x1b[31mred\x1b[0m", "\x07\x08\x7f", "\x1c\x1e\x1f", "\u0080\u009f", "a\x04 b", "'\x04s", " \x04 \x06 ",
    "\ufffd", "\ufffe\uffff", "\ue000\uf8ff", "\U000f0000", "\U0010ffff", "\U00040000", "a\U00050000b", "\U000bffff!\U000c0000", "\U0001fffe", "\u0378\u0379", "\u2fe0",
    # Assigned in Unicode 16: llama.cpp's tables are those of 15.1.
    "\u1c89\u1c8aab", "x\U00010d40\U00010d41 y", "\ua7da1 \ua7cb", "\U00013460\U00013461!", "a\u1b4e.",
    "\u202eright to left\u202c", "\u200e\u200f", "\u2066iso\u2069", "so\u00adft", "a\u2060b", "z\u034fa", "Z̸̢̨͓̈́a̷l̶g̵o̴",
    "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", " <|im_end|> ", "a<|im_end|>b", "<|im_end|><|im_end|>", "<|im_end", "|im_end|>", "<|im_<|im_end|>end|>", "<<|im_end|>>", "<|IM_END|>", "<|im_end|>\n\n", "  <|im_start|>  ", "<repo_name>a/b<file_sep>c.py\nx=1<|endoftext|>", "<reponame><filename><gh_stars><issue_start>", "<jupyter_start><jupyter_text>x<jupyter_code>y<jupyter_output>z<empty_output>", "<jupyter_script", "</s><s>[INST]", "<|eot_id|>", "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n", "9<|im_end|>9", "'<|im_end|>s", "\x04<|im_end|>\x04",
    "a" * 50, "a" * 1000, "A" * 100, "ab" * 100, "=" * 80, "-" * 81, "." * 100, "!" * 33, "0" * 30, "1234567890" * 10, "haha" * 30, "\n" * 100, "\r\n" * 30, " \n" * 20, "  a" * 30, "中" * 60, "😀" * 20, "é" * 60, "_" * 70, "'" * 20, "\x04" * 9, "supercalifragilisticexpialidocious antidisestablishmentarianism", "Donaudampfschifffahrtsgesellschaftskapitän", "a b c d e f g h i j k l m n o p q r s t u v w x y z", "\tindented\n\t\tmore\n    spaces\n", "line one\nline two\r\nline three\rline four", "trailing spaces   \nnext", "   leading spaces", "end with newline\n", "end with spaces   ", "a  b   c    d     e      f", "word\u00a0\u00a0word", "mixed \t \u00a0 \u3000 space", "x\n\n\n   y", "x   \n\n\n   y", "1 \n 2", "! \n !", "? \r\n\r\n ?", "a.\n\nB", "，\n\n。",
]

POOL = (
    [" ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "'", "'s", "'LL", ".", ",", "!", "?", "-", "_", "(", ")", "\"", "/", "<", "|", ">", "\u00a0", "\u3000", "\u200d", "\ufe0f", "\u0301", "\u0000", "\u0004", "\u0016"]
    + ["the", "The", " and", "ing", "er", "re", "ion", "Q", "z", "é", "ß", "Ж", "λ", "ש", "ع", "ह", "ि", "ก", "中", "の", "ア", "한", "😀", "👩", "🏽"]
    + list("0123456789") + ["٣", "Ⅷ", "½", "１"]
)


def random_texts():
    rng = random.Random(20240607)
    for _ in range(90):
        yield "".join(rng.choice(POOL) for _ in range(rng.randrange(1, 30)))
    for limit in [0x7F, 0x24F, 0x7FF, 0xFFFF, 0x3FFFF, 0x10FFFF]:
        for _ in range(15):
            points = (rng.randrange(limit + 1) for _ in range(rng.randrange(1, 16)))
            yield "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)


def relabelled(reader, path, pre):
    """The metadata of the model with another pre-tokeniser, without tensors."""
    writer = GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "tokenizer.ggml.pre"):
            continue
        kind = field.types[0]
        if kind == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), kind)
    writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def main():
    model, tool = sys.argv[1:]
    texts = list(dict.fromkeys(WRITTEN + list(random_texts())))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        reader = GGUFReader(model)
        models = {"smollm": folder / "smollm.gguf"} | {p: folder / f"{p}.gguf" for p in OTHER_PRES}
        for pre, path in models.items():
            relabelled(reader, path, pre)
        for index, text in enumerate(texts):
            (folder / f"{index}.txt").write_bytes(text.encode())

        def ids(pre, index, *options):
            command = [tool, "-m", models[pre], "-f", folder / f"{index}.txt"]
            command += ["--ids", "--no-bos", "--no-escape", "--log-disable", *options]
            done = subprocess.run(command, capture_output=True, check=True)
            return ast.literal_eval(done.stdout.decode().strip())

        with ThreadPoolExecutor(2) as pool:
            every = range(len(texts))
            parse = list(pool.map(lambda i: ids("smollm", i), every))
            plain = list(pool.map(lambda i: ids("smollm", i, "--no-parse-special"), every))
            others = {p: list(pool.map(lambda i: ids(p, i, "--no-parse-special"), every)) for p in OTHER_PRES}

    def lines(rows):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"

    rows = {"texts": texts, "smollm_parse": parse, "smollm_plain": plain}
    for pre in OTHER_PRES:
        # A row equal to SmolLM's own is null.
        rows[pre] = [None if row == plain[i] else row for i, row in enumerate(others[pre])]
    print("{\n" + ",\n".join(f'"{key}": {lines(value)}' for key, value in rows.items()) + "\n}")


main()
