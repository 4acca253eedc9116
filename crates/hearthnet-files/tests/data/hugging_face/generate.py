"""Makes the model directories here, and llama.cpp's conversions of them. See README.md.

Usage: generate.py LLAMA_CPP_DIRECTORY [family ...]
"""

import hashlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
FAMILIES = HERE.parent / "families"
sys.path.insert(0, str(FAMILIES))
import generate as families  # noqa: E402

TINY = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)
SMALL = dict(TINY, hidden_size=8, intermediate_size=8)
del SMALL["head_dim"]
TEXT = """Long ago a miller had three sons, a mill, a donkey and a cat. The sons had to grind, the donkey
to fetch the grain and carry the flour away, and the cat had to catch the mice. When the miller died, the
three sons shared what he left: the oldest got the mill, the second the donkey, the third the cat. There
was nothing left for him, 1812 times over; naïve café größer 中文 🙂🙂. Don't say it's 10:45!
"""
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def save(model, directory, dtype):
    """As `transformers` saves it; norms around zero stay in f32 for families whose GGUF has them exact."""
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = {
        name: t if dtype is None or (dtype == "exact norms" and t.dim() == 1) else
        t.to(torch.float16 if dtype == "exact norms" else dtype)
        for name, t in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def converter(llama_cpp, directory, file_type, out, changes=None, **more):
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(directory, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    made = type("Converter", (kind,), {"model_arch": kind.model_arch, **(changes or {})})
    with torch.inference_mode():
        made(directory, file_type, out, eager=True, **more).write()


def family_directories(llama_cpp, names=()):
    """Directories whose conversions are byte-identical to the GGUF files of the families."""
    for name in names or families.FAMILIES:
        model = families.build(name)
        exact = name.startswith(("gemma", "granitehybrid", "museglimmer", "nemotronh", "qwen35", "qwen3next"))
        directory = HERE / name
        save(model, directory, "exact norms" if exact else torch.float16)
        families.as_published(directory)
        if name == "qwen35moe":
            stack_experts(directory)

        def again(_):
            loaded = model.__class__.from_pretrained(directory, dtype=torch.float32)
            families.HERE = Path(made)
            families.convert(loaded, name, llama_cpp)

        with tempfile.TemporaryDirectory() as made:
            again(made)
            new = (Path(made) / f"{name}.gguf").read_bytes()
        assert new == (FAMILIES / f"{name}.gguf").read_bytes(), name


def encoder_directories(llama_cpp):
    """As `family_directories`, of models that make vectors of texts."""
    for name in families.ENCODERS:
        directory = HERE / name
        save(families.build_encoder(name), directory, "exact norms" if name.startswith("gemma") else torch.float16)
        families.finish_encoder(name, directory, torch.float16)
        with tempfile.TemporaryDirectory() as made:
            out = Path(made) / f"{name}.gguf"
            families.convert_encoder(directory, name, llama_cpp, out)
            assert out.read_bytes() == (FAMILIES / f"{name}.gguf").read_bytes(), name


def stack_experts(directory):
    """As Qwen3.5 is published: one tensor for the gates and ups of all experts, one for the downs."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts.0." in name]:
        each = []
        while (of := name.replace(".experts.0.", f".experts.{len(each)}.")) in tensors:
            each.append(tensors.pop(of))
        tensors[name.replace(".experts.0.", ".experts.").removesuffix(".weight")] = torch.stack(each)
    for name in [name for name in tensors if name.endswith("experts.gate_proj")]:
        up = tensors.pop(name.replace("gate_proj", "up_proj"))
        tensors[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensors.pop(name), up], dim=1)
    save_file(tensors, path, metadata={"format": "pt"})


def types(llama_cpp):
    """Every type as it is and as F16: the SHA-256 of each tensor."""
    import gguf

    known = {}
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    outs = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f16": gguf.LlamaFileType.MOSTLY_F16,
            "f32": gguf.LlamaFileType.ALL_F32}
    torch.manual_seed(11)
    config = transformers.Gemma2Config(**TINY, vocab_size=32, query_pre_attn_scalar=16, sliding_window=8,
                                       eos_token_id=None, pad_token_id=0, bos_token_id=1)
    model = transformers.Gemma2ForCausalLM(config).float()
    with torch.no_grad():
        for p in model.parameters():
            # From far below half precision's smallest value to far above its smallest normal one.
            p.copy_(torch.randn(p.shape) * 10 ** (torch.rand(p.shape) * 10 - 8))
    for kind, dtype in kinds.items():
        directory = HERE / f"types-{kind}"
        save(model, directory, dtype)
        for out in {kind, "f16", "f32"}:
            known[f"{kind} as {out}"] = digests(llama_cpp, directory, outs[out])
    mxfp4(HERE / "types-mxfp4")
    known["mxfp4 as mxfp4"] = digests(llama_cpp, HERE / "types-mxfp4", outs["bf16"])
    return known


def digests(llama_cpp, directory, out):
    import gguf

    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "model.gguf"
        converter(llama_cpp, directory, out, path, {"set_vocab": lambda self: None})
        return {
            t.name: [t.tensor_type.name, hashlib.sha256(t.data.tobytes()).hexdigest()]
            for t in gguf.GGUFReader(path).tensors
        }


def mxfp4(directory):
    """As gpt-oss is published: BF16, except for the experts, whose codes and scales are separate."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(13)
    rope = families.yarn(150000.0, beta_fast=8.0, beta_slow=1.0, truncate=False)
    sizes = dict(TINY, hidden_size=64, num_local_experts=3, num_experts_per_tok=2, sliding_window=7)
    config = transformers.GptOssConfig(**sizes, vocab_size=32, rope_parameters=rope, bos_token_id=1,
                                       eos_token_id=None, pad_token_id=0)
    save(transformers.GptOssForCausalLM(config).float(), directory, torch.bfloat16)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.down_proj", "experts.gate_up_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(115, 125, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"modules_to_not_convert": ["model.embed_tokens"], "quant_method": "mxfp4"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def byte_level(pattern, specials, ignore_merges, bos):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers import processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = byte_level if pattern is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    if pattern and not bos:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False),
                          AddedToken("<|tool|>", special=False, normalized=False)])
    plain = processors.ByteLevel(trim_offsets=False)
    if bos:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([plain, template])
    else:
        tokenizer.post_processor = plain
    return tokenizer


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def write_byte_level(directory, tokenizer, settings):
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_sentence_piece(directory):
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=360, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, hard_vocab_limit=False, user_defined_symbols=["<tool>"],
        normalization_rule_name="identity")
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    settings = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": {"content": "</s>"},
        "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False, "add_prefix_space": True,
        "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}],
        "added_tokens_decoder": {
            "0": {"content": "<unk>", "special": True}, "1": {"content": "<s>", "special": True},
            "2": {"content": "</s>", "special": True}, "370": {"content": "▁said", "special": False},
            "371": {"content": "<|end|>", "special": False},
        },
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def tokenizers(llama_cpp):
    """The tokenizer's metadata of each kind, as the converter writes it."""
    import gguf

    def qwen2(d):
        # As in Qwen2.5: named in tokenizer_config.json, with the template in a file of its own.
        tokenizer = byte_level(QWEN2, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], False, None)
        write_byte_level(d, tokenizer, {"bos_token": None, "eos_token": "<|im_end|>",
                                        "pad_token": "<|endoftext|>", "add_bos_token": False})
        (d / "chat_template.jinja").write_text(TEMPLATE)
        (d / "generation_config.json").write_text(json.dumps(
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}))

    def llama3(d):
        tokenizer = byte_level(LLAMA3, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], True,
                               "<|begin_of_text|>")
        write_byte_level(d, tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
                                        "chat_template": TEMPLATE})

    def olmoe(d):
        write_byte_level(d, byte_level(None, ["<|endoftext|>"], False, None), {"eos_token": "<|endoftext|>"})

    def bert(d):
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
        from tokenizers import processors, trainers

        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer.train_from_iterator(
            [TEXT], trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
        tokenizer.add_tokens([AddedToken("donkeys", special=False, normalized=True)])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(s, tokenizer.token_to_id(s)) for s in ("[CLS]", "[SEP]")])
        write_byte_level(d, tokenizer, {
            "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]",
            "mask_token": "[MASK]", "do_lower_case": True, "tokenizer_class": "BertTokenizer"})
        # Ids of the crate `tokenizers` itself.
        lines = [*TEXT.splitlines(), "Ünïcode ELÈVE\u00a0İstanbul ß", "中文字 don't-stop... a\u0007b\u200dc", "x" * 101, ""]
        known = [[line, tokenizer.encode(line).ids] for line in lines]
        (HERE / "text-bert.ids.json").write_text(json.dumps(known, ensure_ascii=False) + "\n")

    kinds = {
        "text-bert": (transformers.BertConfig, bert, "bert-bge", 220),
        "text-qwen2": (transformers.Qwen2Config, qwen2, "qwen2", 320),
        "text-llama3": (transformers.LlamaConfig, llama3, "llama-bpe", 320),
        "text-olmoe": (transformers.OlmoeConfig, olmoe, "olmo", 320),
        "text-llama": (transformers.LlamaConfig, write_sentence_piece, None, 380),
    }
    known = {}
    for name, (config_class, write, pre, vocab) in kinds.items():
        torch.manual_seed(5)
        more = dict(num_experts=2, num_experts_per_tok=1) if "olmoe" in name else {}
        if name == "text-bert":
            config = config_class(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                  max_position_embeddings=64, vocab_size=vocab)
            model = transformers.BertModel(config, add_pooling_layer=False)
        else:
            config = config_class(**SMALL, **more, vocab_size=vocab, tie_word_embeddings="olmoe" not in name,
                                  eos_token_id=2, bos_token_id=1, pad_token_id=None)
            model = transformers.AutoModelForCausalLM.from_config(config)
        directory = HERE / name
        save(model, directory, torch.float16)
        write(directory)
        with tempfile.TemporaryDirectory() as made:
            path = Path(made) / "model.gguf"
            changes = {"get_vocab_base_pre": lambda self, _, pre=pre: pre}
            converter(llama_cpp, directory, gguf.LlamaFileType.MOSTLY_F16, path, changes)
            reader = gguf.GGUFReader(path)
            known[name] = {
                key: field.contents() for key, field in reader.fields.items()
                if key.startswith(("tokenizer.", "general.sampling."))
            }
    return known


def main():
    llama_cpp = Path(sys.argv[1])
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    family_directories(llama_cpp, sys.argv[2:])
    if sys.argv[2:]:
        return
    encoder_directories(llama_cpp)
    (HERE / "types.json").write_text(json.dumps(types(llama_cpp), indent=1, sort_keys=True) + "\n")
    known = tokenizers(llama_cpp)
    (HERE / "text.json").write_text(json.dumps(known, sort_keys=True, ensure_ascii=False).replace('}, "', '},\n"') + "\n")


main()
