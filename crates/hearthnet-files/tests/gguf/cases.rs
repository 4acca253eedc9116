//! Small GGUF files, valid and damaged in every way that the format allows, with the reader's
//! response. They are also the fuzzer's first inputs.

use hearthnet_testkit::{TinyLlama, rows};

/// A file with the expected error prefix; none if it is valid.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) bytes: Vec<u8>,
    pub(crate) error: Option<&'static str>,
}

impl Case {
    fn of((name, raw, error): (&'static str, Raw, Option<&'static str>)) -> Self {
        let bytes = raw.0;
        Self { name, bytes, error }
    }
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

/// File of the case of this name.
pub(crate) fn named(name: &str) -> Vec<u8> {
    let case = all().into_iter().find(|case| case.name == name);
    case.unwrap().bytes
}

fn header() -> Vec<Case> {
    let cases = rows! {
        "empty", Raw(Vec::new()) => Some("magic:");
        "magic-cut", Raw(b"GGU".to_vec()) => Some("magic:");
        "magic-other", Raw(b"GGML".to_vec()).u32(3) => Some("magic:");
        "version-1", Raw::new(1, 0, 0) => Some("version: GGUF version 1 ");
        "version-4", Raw::new(4, 0, 0) => Some("version: GGUF version 4 ");
        "version-0", Raw::new(0, 0, 0) => Some("version: GGUF version 0 ");
        "version-big-endian",
            Raw::new(3u32.swap_bytes(), 0, 0) => Some("version: this is a big-endian");
        "tensor-count-max", Raw::new(3, u64::MAX, 0) => Some("tensor_count:");
        "tensor-count-beyond-file", Raw::new(3, 1, 0) => Some("tensor_count:");
        "metadata-count-max", Raw::new(3, 0, u64::MAX) => Some("metadata_kv_count:");
        "metadata-count-beyond-file", Raw::new(3, 0, 1 << 40) => Some("metadata_kv_count:");
        "version-3-nothing", Raw::new(3, 0, 0) => None;
        "version-2-nothing", Raw::new(2, 0, 0) => None;
        "trailing-nothing",
            Raw::new(3, 0, 0).bytes(&[0; 40]) => Some("tensor_data: 32 unexpected bytes");
    };
    cases.map(Case::of).into()
}

fn metadata() -> Vec<Case> {
    let alignment = |value_type| Raw::new(3, 0, 1).key("general.alignment", value_type);
    let value = |value_type, bytes: &[u8]| Raw::new(3, 0, 1).key("k", value_type).bytes(bytes);
    let cases = rows! {
        "metadata-every-type",
            Raw::new(3, 0, 13).key("u8", 0).bytes(&[1]).key("i8", 1).bytes(&[0xff])
                .key("u16", 2).bytes(&[1, 2]).key("i16", 3).bytes(&[0xfe, 0xff]).key("u32", 4)
                .u32(5).key("i32", 5).u32(u32::MAX).key("f32", 6).bytes(&1.5f32.to_le_bytes())
                .key("bool", 7).bytes(&[1]).key("string", 8).string("text").key("u64", 10)
                .u64(7).key("i64", 11).u64(u64::MAX).key("f64", 12)
                .bytes(&f64::NAN.to_le_bytes()).key("array", 9).u32(STRING).u64(2).string("one")
                .string("") => None;
        "key-empty", Raw::new(3, 0, 1).string("").u32(U32).u32(1) => Some("metadata_kv[0].key:");
        "key-not-utf8",
            Raw::new(3, 0, 1).string(b"\xff\xfe").u32(U32).u32(1) => Some("metadata_kv[0].key:");
        "key-length-max", Raw::new(3, 0, 1).u64(u64::MAX).u64(0) => Some("metadata_kv[0].key:");
        "key-too-long",
            Raw::new(3, 0, 1).u64(1 << 16).bytes(&[b'k'; 1 << 16]) => Some("metadata_kv[0].key:");
        "key-beyond-file", Raw::new(3, 0, 1).u64(100).u64(0) => Some("metadata_kv[0].key:");
        "key-twice",
            Raw::new(3, 0, 2).key("k", U32).u32(1).key("k", U32).u32(2)
                => Some("metadata_kv[1].key:");
        "value-type-13", value(13, &[0; 8]) => Some("metadata_kv[0].value_type:");
        "value-type-max", value(u32::MAX, &[0; 8]) => Some("metadata_kv[0].value_type:");
        "bool-2", value(BOOL, &[2]) => Some("metadata_kv \"k\":");
        "string-length-max", value(STRING, &u64::MAX.to_le_bytes()) => Some("metadata_kv \"k\":");
        "string-not-utf8",
            value(STRING, b"\x02\0\0\0\0\0\0\0\xc3\x28") => Some("metadata_kv \"k\":");
        "u64-cut", value(U64, &[0; 7]) => Some("metadata_kv \"k\":");
        "array-nested", array(ARRAY, 1).u32(U32).u64(1).u32(1) => Some("metadata_kv \"k\":");
        "array-of-nothing-known", array(14, 1).u64(0) => Some("metadata_kv[0].value.type:");
        "array-length-max", array(U64, u64::MAX).u64(0) => Some("metadata_kv[0].value.len:");
        "array-length-overflow", array(U64, 1 << 61).u64(0) => Some("metadata_kv[0].value.len:");
        "array-beyond-file", array(U64, 2).u64(0) => Some("metadata_kv[0].value.len:");
        "array-string-beyond-file",
            array(STRING, 2).string("a").u64(9) => Some("metadata_kv \"k\"[1]:");
        "array-string-not-utf8", array(STRING, 1).string(b"\xff") => Some("metadata_kv \"k\"[0]:");
        "array-bool-3", array(BOOL, 3).bytes(&[0, 1, 3]) => Some("metadata_kv \"k\"[2]:");
        "array-empty", array(U64, 0) => None;
        "alignment-0", alignment(U32).u32(0) => Some("general.alignment:");
        "alignment-24", alignment(U32).u32(24) => Some("general.alignment:");
        "alignment-4", alignment(U32).u32(4) => Some("general.alignment:");
        "alignment-huge", alignment(U32).u32(1 << 31) => Some("general.alignment:");
        "alignment-u64", alignment(U64).u64(32) => Some("general.alignment:");
        "alignment-64", alignment(U32).u32(64) => None;
        "key-with-escape",
            Raw::new(3, 0, 1).string("\x1b[2J").u32(99) => Some("metadata_kv[0].value_type:");
    };
    cases.map(Case::of).into()
}

fn tensors() -> Vec<Case> {
    let cases = rows! {
        "tensor-vector", one(&[8], F32, 0, 32) => None;
        "tensor-matrix", one(&[32, 2], Q8_0, 0, 68).pad() => None;
        "tensor-four-dimensions", one(&[2, 2, 1, 2], F32, 0, 32) => None;
        "name-empty",
            Raw::new(3, 1, 0).tensor("", &[8], F32, 0).pad() => Some("tensor_infos[0].name:");
        "name-too-long",
            Raw::new(3, 1, 0).tensor([b'n'; 65], &[8], F32, 0).pad()
                => Some("tensor_infos[0].name:");
        "name-not-utf8",
            Raw::new(3, 1, 0).tensor(b"\x80", &[8], F32, 0).pad() => Some("tensor_infos[0].name:");
        "name-twice",
            Raw::new(3, 2, 0).tensor("t", &[8], F32, 0).tensor("t", &[8], F32, 32).pad()
                .bytes(&[0; 64]) => Some("tensor_infos[1].name:");
        "dimensions-none",
            one(&[], F32, 0, 32).bytes(&[0; 32]) => Some("tensor_infos \"t\".n_dimensions:");
        "dimensions-five", one(&[1; 5], F32, 0, 32) => Some("tensor_infos \"t\".n_dimensions:");
        "dimensions-max",
            Raw::new(3, 1, 0).string("t").u32(u32::MAX).bytes(&[0; 64])
                => Some("tensor_infos \"t\".n_dimensions:");
        "dimension-zero", one(&[8, 0], F32, 0, 32) => Some("tensor_infos \"t\".dimensions:");
        "dimension-max", one(&[u64::MAX], F32, 0, 32) => Some("tensor_infos \"t\".dimensions:");
        "elements-overflow",
            one(&[1 << 32, 1 << 32], F32, 0, 32) => Some("tensor_infos \"t\".dimensions:");
        "elements-2-63",
            one(&[1 << 21, 1 << 21, 1 << 21], F32, 0, 32) => Some("tensor_infos \"t\".dimensions:");
        "bytes-overflow", one(&[1 << 61], 28, 0, 32) => Some("tensor_infos \"t\".dimensions:");
        "type-removed", one(&[8], 4, 0, 32) => Some("tensor_infos \"t\".type:");
        "type-max", one(&[8], u32::MAX, 0, 32) => Some("tensor_infos \"t\".type:");
        "row-not-in-blocks", one(&[33, 2], Q8_0, 0, 96) => Some("tensor_infos \"t\".dimensions:");
        "offset-misaligned", one(&[8], F32, 4, 64) => Some("tensor_infos \"t\".offset:");
        "offset-at-end", one(&[8], F32, 32, 32) => Some("tensor_infos \"t\".offset:");
        "offset-overflow", one(&[8], F32, u64::MAX - 31, 32) => Some("tensor_infos \"t\".offset:");
        "data-beyond-file", one(&[9], F32, 0, 32) => Some("tensor_infos \"t\".offset:");
        "data-far-beyond-file", one(&[1 << 40], F32, 0, 32) => Some("tensor_infos \"t\".offset:");
        "trailing-byte", one(&[8], F32, 0, 33) => Some("tensor_data: 1 unexpected bytes");
        "last-tensor-not-padded", one(&[7], F32, 0, 28) => None;
        "tensors-two", two(0, 32, 64) => None;
        "tensors-in-other-order", two(32, 0, 64) => None;
        "tensors-with-gap", two(0, 64, 96) => None;
        "tensors-at-one-place", two(0, 0, 64) => Some("tensor_infos.offset:");
        "tensors-overlap",
            Raw::new(3, 2, 0).tensor("a", &[16], F32, 0).tensor("b", &[8], F32, 32).pad()
                .bytes(&[0; 64]) => Some("tensor_infos.offset:");
        "offset-misaligned-to-64",
            Raw::new(3, 1, 1).key("general.alignment", U32).u32(64).tensor("t", &[8], F32, 32)
                .pad().bytes(&[0; 128]) => Some("tensor_infos \"t\".offset:");
    };
    cases.map(Case::of).into()
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
    let cases = rows! {
        "cut-nowhere", whole.clone() => None;
        "cut-version", Raw(whole.0[..6].to_vec()) => Some("version:");
        "cut-tensor-count", Raw(whole.0[..15].to_vec()) => Some("tensor_count:");
        "cut-metadata-count", Raw(whole.0[..23].to_vec()) => Some("tensor_count:");
        "cut-key", cut(&first_key, 1) => Some("tensor_count:");
        "cut-second-key", cut(&second_key, 2) => Some("metadata_kv[1].key:");
        "cut-array-type", cut(&second_type, 2) => Some("metadata_kv[1].value.type:");
        "cut-array-length", second_type => Some("metadata_kv[1].value.len:");
        "cut-array-string", cut(&second, 1) => Some("metadata_kv \"array\"[0]:");
        "cut-before-tensors", second => Some("tensor_infos[0].name:");
        "cut-tensor-name", cut(&name, 3) => Some("tensor_infos[0].name:");
        "cut-dimensions", cut(&dims, 8) => Some("tensor_infos \"tensor\".dimensions:");
        "cut-type", cut(&dtype, 1) => Some("tensor_infos \"tensor\".type:");
        "cut-offset", cut(&infos, 4) => Some("tensor_infos \"tensor\".offset:");
        "cut-before-data", infos => Some("tensor_infos \"tensor\".offset:");
        "cut-data", cut(&whole, 1) => Some("tensor_infos \"tensor\".offset:");
    };
    cases.map(Case::of).into()
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
    let untied = TinyLlama {
        tied: false,
        weights: "q8_0",
        boundary: Some("bf16"),
        ..small.clone()
    };
    let cases = [("model-tied", small), ("model-untied", untied)];
    let cases = cases.map(|(name, model)| Case::of((name, Raw(model.bytes()), None)));
    cases.into()
}
