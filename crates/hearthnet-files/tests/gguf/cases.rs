//! Small GGUF files, valid and damaged in every way that the format allows, with the reader's
//! response. They are also the fuzzer's first inputs.

use hearthnet_testkit::TinyLlama;

/// A file with the expected error prefix; none if it is valid.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) bytes: Vec<u8>,
    pub(crate) error: Option<&'static str>,
}

/// Builds a file piece by piece.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    /// Magic, version and counts.
    fn new(version: u32, tensors: u64, metadata: u64) -> Self {
        Self(b"GGUF".to_vec())
            .u32(version)
            .u64(tensors)
            .u64(metadata)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn string(self, value: impl AsRef<[u8]>) -> Self {
        self.u64(value.as_ref().len() as u64).bytes(value.as_ref())
    }

    /// A metadata pair, up to its value.
    fn key(self, key: &str, value_type: u32) -> Self {
        self.string(key).u32(value_type)
    }

    fn tensor(self, name: impl AsRef<[u8]>, dims: &[u64], dtype: u32, offset: u64) -> Self {
        let start = self.string(name).u32(dims.len() as u32);
        dims.iter()
            .fold(start, |raw, &dim| raw.u64(dim))
            .u32(dtype)
            .u64(offset)
    }

    /// Padding to 32 bytes.
    fn pad(mut self) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32), 0);
        self
    }

    fn refused(self, name: &'static str, error: &'static str) -> Case {
        Case {
            name,
            bytes: self.0,
            error: Some(error),
        }
    }

    fn sound(self, name: &'static str) -> Case {
        Case {
            name,
            bytes: self.0,
            error: None,
        }
    }
}

const U32: u32 = 4;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;
const F32: u32 = 0;
const Q8_0: u32 = 8;

/// File with one tensor; `data` bytes follow the header.
fn one(dims: &[u64], dtype: u32, offset: u64, data: usize) -> Raw {
    Raw::new(3, 1, 0)
        .tensor("t", dims, dtype, offset)
        .pad()
        .bytes(&vec![1; data])
}

/// File with two tensors of 32 bytes each.
fn two(first: u64, second: u64, data: usize) -> Raw {
    Raw::new(3, 2, 0)
        .tensor("a", &[8], F32, first)
        .tensor("b", &[8], F32, second)
        .pad()
        .bytes(&vec![1; data])
}

/// File with one metadata pair, whose array has this element type and count.
fn array(element: u32, len: u64) -> Raw {
    Raw::new(3, 0, 1).key("k", ARRAY).u32(element).u64(len)
}

pub(crate) fn all() -> Vec<Case> {
    [header(), metadata(), tensors(), truncated(), models()]
        .into_iter()
        .flatten()
        .collect()
}

fn header() -> Vec<Case> {
    vec![
        Raw(Vec::new()).refused("empty", "magic:"),
        Raw(b"GGU".to_vec()).refused("magic-cut", "magic:"),
        Raw(b"GGML".to_vec())
            .u32(3)
            .refused("magic-other", "magic:"),
        Raw::new(1, 0, 0).refused("version-1", "version: GGUF version 1 "),
        Raw::new(4, 0, 0).refused("version-4", "version: GGUF version 4 "),
        Raw::new(0, 0, 0).refused("version-0", "version: GGUF version 0 "),
        Raw::new(3u32.swap_bytes(), 0, 0)
            .refused("version-big-endian", "version: this is a big-endian"),
        Raw::new(3, u64::MAX, 0).refused("tensor-count-max", "tensor_count:"),
        Raw::new(3, 1, 0).refused("tensor-count-beyond-file", "tensor_count:"),
        Raw::new(3, 0, u64::MAX).refused("metadata-count-max", "metadata_kv_count:"),
        Raw::new(3, 0, 1 << 40).refused("metadata-count-beyond-file", "metadata_kv_count:"),
        Raw::new(3, 0, 0).sound("version-3-nothing"),
        Raw::new(2, 0, 0).sound("version-2-nothing"),
        Raw::new(3, 0, 0)
            .bytes(&[0; 40])
            .refused("trailing-nothing", "tensor_data: 32 unexpected bytes"),
    ]
}

fn metadata() -> Vec<Case> {
    let value = |value_type, bytes: &[u8]| Raw::new(3, 0, 1).key("k", value_type).bytes(bytes);
    vec![
        Raw::new(3, 0, 13)
            .key("u8", 0)
            .bytes(&[1])
            .key("i8", 1)
            .bytes(&[0xff])
            .key("u16", 2)
            .bytes(&[1, 2])
            .key("i16", 3)
            .bytes(&[0xfe, 0xff])
            .key("u32", 4)
            .u32(5)
            .key("i32", 5)
            .u32(u32::MAX)
            .key("f32", 6)
            .bytes(&1.5f32.to_le_bytes())
            .key("bool", 7)
            .bytes(&[1])
            .key("string", 8)
            .string("text")
            .key("u64", 10)
            .u64(7)
            .key("i64", 11)
            .u64(u64::MAX)
            .key("f64", 12)
            .bytes(&f64::NAN.to_le_bytes())
            .key("array", 9)
            .u32(STRING)
            .u64(2)
            .string("one")
            .string("")
            .sound("metadata-every-type"),
        Raw::new(3, 0, 1)
            .string("")
            .u32(U32)
            .u32(1)
            .refused("key-empty", "metadata_kv[0].key:"),
        Raw::new(3, 0, 1)
            .string(b"\xff\xfe")
            .u32(U32)
            .u32(1)
            .refused("key-not-utf8", "metadata_kv[0].key:"),
        Raw::new(3, 0, 1)
            .u64(u64::MAX)
            .u64(0)
            .refused("key-length-max", "metadata_kv[0].key:"),
        Raw::new(3, 0, 1)
            .u64(1 << 16)
            .bytes(&[b'k'; 1 << 16])
            .refused("key-too-long", "metadata_kv[0].key:"),
        Raw::new(3, 0, 1)
            .u64(100)
            .u64(0)
            .refused("key-beyond-file", "metadata_kv[0].key:"),
        Raw::new(3, 0, 2)
            .key("k", U32)
            .u32(1)
            .key("k", U32)
            .u32(2)
            .refused("key-twice", "metadata_kv[1].key:"),
        value(13, &[0; 8]).refused("value-type-13", "metadata_kv[0].value_type:"),
        value(u32::MAX, &[0; 8]).refused("value-type-max", "metadata_kv[0].value_type:"),
        value(BOOL, &[2]).refused("bool-2", "metadata_kv \"k\":"),
        value(STRING, &u64::MAX.to_le_bytes()).refused("string-length-max", "metadata_kv \"k\":"),
        value(STRING, b"\x02\0\0\0\0\0\0\0\xc3\x28")
            .refused("string-not-utf8", "metadata_kv \"k\":"),
        value(U64, &[0; 7]).refused("u64-cut", "metadata_kv \"k\":"),
        array(ARRAY, 1)
            .u32(U32)
            .u64(1)
            .u32(1)
            .refused("array-nested", "metadata_kv \"k\":"),
        array(14, 1)
            .u64(0)
            .refused("array-of-nothing-known", "metadata_kv[0].value.type:"),
        array(U64, u64::MAX)
            .u64(0)
            .refused("array-length-max", "metadata_kv[0].value.len:"),
        array(U64, 1 << 61)
            .u64(0)
            .refused("array-length-overflow", "metadata_kv[0].value.len:"),
        array(U64, 2)
            .u64(0)
            .refused("array-beyond-file", "metadata_kv[0].value.len:"),
        array(STRING, 2)
            .string("a")
            .u64(9)
            .refused("array-string-beyond-file", "metadata_kv \"k\"[1]:"),
        array(STRING, 1)
            .string(b"\xff")
            .refused("array-string-not-utf8", "metadata_kv \"k\"[0]:"),
        array(BOOL, 3)
            .bytes(&[0, 1, 3])
            .refused("array-bool-3", "metadata_kv \"k\"[2]:"),
        array(U64, 0).sound("array-empty"),
        Raw::new(3, 0, 1)
            .key("general.alignment", U32)
            .u32(0)
            .refused("alignment-0", "general.alignment:"),
        Raw::new(3, 0, 1)
            .key("general.alignment", U32)
            .u32(24)
            .refused("alignment-24", "general.alignment:"),
        Raw::new(3, 0, 1)
            .key("general.alignment", U32)
            .u32(4)
            .refused("alignment-4", "general.alignment:"),
        Raw::new(3, 0, 1)
            .key("general.alignment", U32)
            .u32(1 << 31)
            .refused("alignment-huge", "general.alignment:"),
        Raw::new(3, 0, 1)
            .key("general.alignment", U64)
            .u64(32)
            .refused("alignment-u64", "general.alignment:"),
        Raw::new(3, 0, 1)
            .key("general.alignment", U32)
            .u32(64)
            .sound("alignment-64"),
        Raw::new(3, 0, 1)
            .string("\x1b[2J")
            .u32(99)
            .refused("key-with-escape", "metadata_kv[0].value_type:"),
    ]
}

fn tensors() -> Vec<Case> {
    vec![
        one(&[8], F32, 0, 32).sound("tensor-vector"),
        one(&[32, 2], Q8_0, 0, 68).pad().sound("tensor-matrix"),
        one(&[2, 2, 1, 2], F32, 0, 32).sound("tensor-four-dimensions"),
        Raw::new(3, 1, 0)
            .tensor("", &[8], F32, 0)
            .pad()
            .refused("name-empty", "tensor_infos[0].name:"),
        Raw::new(3, 1, 0)
            .tensor([b'n'; 65], &[8], F32, 0)
            .pad()
            .refused("name-too-long", "tensor_infos[0].name:"),
        Raw::new(3, 1, 0)
            .tensor(b"\x80", &[8], F32, 0)
            .pad()
            .refused("name-not-utf8", "tensor_infos[0].name:"),
        Raw::new(3, 2, 0)
            .tensor("t", &[8], F32, 0)
            .tensor("t", &[8], F32, 32)
            .pad()
            .bytes(&[0; 64])
            .refused("name-twice", "tensor_infos[1].name:"),
        one(&[], F32, 0, 32)
            .bytes(&[0; 32])
            .refused("dimensions-none", "tensor_infos \"t\".n_dimensions:"),
        one(&[1; 5], F32, 0, 32).refused("dimensions-five", "tensor_infos \"t\".n_dimensions:"),
        Raw::new(3, 1, 0)
            .string("t")
            .u32(u32::MAX)
            .bytes(&[0; 64])
            .refused("dimensions-max", "tensor_infos \"t\".n_dimensions:"),
        one(&[8, 0], F32, 0, 32).refused("dimension-zero", "tensor_infos \"t\".dimensions:"),
        one(&[u64::MAX], F32, 0, 32).refused("dimension-max", "tensor_infos \"t\".dimensions:"),
        one(&[1 << 32, 1 << 32], F32, 0, 32)
            .refused("elements-overflow", "tensor_infos \"t\".dimensions:"),
        one(&[1 << 21, 1 << 21, 1 << 21], F32, 0, 32)
            .refused("elements-2-63", "tensor_infos \"t\".dimensions:"),
        one(&[1 << 61], 28, 0, 32).refused("bytes-overflow", "tensor_infos \"t\".dimensions:"),
        one(&[8], 4, 0, 32).refused("type-removed", "tensor_infos \"t\".type:"),
        one(&[8], u32::MAX, 0, 32).refused("type-max", "tensor_infos \"t\".type:"),
        one(&[33, 2], Q8_0, 0, 96).refused("row-not-in-blocks", "tensor_infos \"t\".dimensions:"),
        one(&[8], F32, 4, 64).refused("offset-misaligned", "tensor_infos \"t\".offset:"),
        one(&[8], F32, 32, 32).refused("offset-at-end", "tensor_infos \"t\".offset:"),
        one(&[8], F32, u64::MAX - 31, 32).refused("offset-overflow", "tensor_infos \"t\".offset:"),
        one(&[9], F32, 0, 32).refused("data-beyond-file", "tensor_infos \"t\".offset:"),
        one(&[1 << 40], F32, 0, 32).refused("data-far-beyond-file", "tensor_infos \"t\".offset:"),
        one(&[8], F32, 0, 33).refused("trailing-byte", "tensor_data: 1 unexpected bytes"),
        one(&[7], F32, 0, 28).sound("last-tensor-not-padded"),
        two(0, 32, 64).sound("tensors-two"),
        two(32, 0, 64).sound("tensors-in-other-order"),
        two(0, 64, 96).sound("tensors-with-gap"),
        two(0, 0, 64).refused("tensors-at-one-place", "tensor_infos.offset:"),
        Raw::new(3, 2, 0)
            .tensor("a", &[16], F32, 0)
            .tensor("b", &[8], F32, 32)
            .pad()
            .bytes(&[0; 64])
            .refused("tensors-overlap", "tensor_infos.offset:"),
        Raw::new(3, 1, 1)
            .key("general.alignment", U32)
            .u32(64)
            .tensor("t", &[8], F32, 32)
            .pad()
            .bytes(&[0; 128])
            .refused("offset-misaligned-to-64", "tensor_infos \"t\".offset:"),
    ]
}

/// A valid file, truncated inside every structure.
fn truncated() -> Vec<Case> {
    let start = Raw::new(3, 1, 2);
    let first_key = start.clone().string("key");
    let first = first_key.clone().u32(U32).u32(7);
    let second_key = first.clone().string("array");
    let second_type = second_key.clone().u32(ARRAY).u32(STRING);
    let second = second_type.clone().u64(1).string("text");
    let name = second.clone().string("tensor");
    let dims = name.clone().u32(2).u64(4).u64(2);
    let dtype = dims.clone().u32(F32);
    let infos = dtype.clone().u64(0);
    let whole = infos.clone().pad().bytes(&[1; 32]);
    let cut = |raw: &Raw, by: usize| Raw(raw.0[..raw.0.len() - by].to_vec());
    // Counts are compared with the rest of the file first. So an early truncation is detected
    // before its position is reached.
    vec![
        whole.clone().sound("cut-nowhere"),
        Raw(whole.0[..6].to_vec()).refused("cut-version", "version:"),
        Raw(whole.0[..15].to_vec()).refused("cut-tensor-count", "tensor_count:"),
        Raw(whole.0[..23].to_vec()).refused("cut-metadata-count", "tensor_count:"),
        cut(&first_key, 1).refused("cut-key", "tensor_count:"),
        cut(&second_key, 2).refused("cut-second-key", "metadata_kv[1].key:"),
        cut(&second_type, 2).refused("cut-array-type", "metadata_kv[1].value.type:"),
        second_type.refused("cut-array-length", "metadata_kv[1].value.len:"),
        cut(&second, 1).refused("cut-array-string", "metadata_kv \"array\"[0]:"),
        second.refused("cut-before-tensors", "tensor_infos[0].name:"),
        cut(&name, 3).refused("cut-tensor-name", "tensor_infos[0].name:"),
        cut(&dims, 8).refused("cut-dimensions", "tensor_infos \"tensor\".dimensions:"),
        cut(&dtype, 1).refused("cut-type", "tensor_infos \"tensor\".type:"),
        cut(&infos, 4).refused("cut-offset", "tensor_infos \"tensor\".offset:"),
        infos.refused("cut-before-data", "tensor_infos \"tensor\".offset:"),
        cut(&whole, 1).refused("cut-data", "tensor_infos \"tensor\".offset:"),
    ]
}

/// Whole models, so that the fuzzer gets past the reader.
fn models() -> Vec<Case> {
    let small = TinyLlama {
        layers: 1,
        width: 32,
        heads: 2,
        kv_heads: 1,
        ffn: 32,
        vocab: TinyLlama::LEAST_VOCAB,
        weights: "q4_0",
        embedding: "q4_0",
        ..TinyLlama::default()
    };
    vec![
        Raw(small.bytes()).sound("model-tied"),
        Raw(TinyLlama {
            tied: false,
            weights: "q8_0",
            boundary: Some("bf16"),
            ..small
        }
        .bytes())
        .sound("model-untied"),
    ]
}
