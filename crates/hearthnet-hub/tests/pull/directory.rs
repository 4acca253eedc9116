//! Pieces of an adopted model from a Hugging Face directory, over HTTP and in a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hearthnet_files::gguf::TensorType;
use hearthnet_files::hugging_face::import;
use hearthnet_files::part::{Identity, Part, identity_of};
use hearthnet_files::{Manifest, ModelFile};
use hearthnet_hub::parts::{DirectorySource, LocalSource, Object, PieceSource};
use hearthnet_hub::pull::PullOptions;
use hearthnet_hub::reference::adopted_source;
use tempfile::TempDir;

use super::parts::{Source, all, asked, get};
use super::server::{Answer, Request, Server, answer, status};

const WIDTH: u64 = 512;
const FFN: u64 = 1024;
const KEYS: u64 = 128;
const LAYERS: u64 = 3;
/// Bytes of a file's beginning that are asked for with its length.
const BEGIN: u64 = 64 << 10;

/// Names and shapes of a block's tensors.
const BLOCK: [(&str, &[u64]); 9] = [
    ("input_layernorm", &[WIDTH]),
    ("post_attention_layernorm", &[WIDTH]),
    ("self_attn.q_proj", &[WIDTH, WIDTH]),
    ("self_attn.k_proj", &[KEYS, WIDTH]),
    ("self_attn.v_proj", &[KEYS, WIDTH]),
    ("self_attn.o_proj", &[WIDTH, WIDTH]),
    ("mlp.gate_proj", &[FFN, WIDTH]),
    ("mlp.up_proj", &[FFN, WIDTH]),
    ("mlp.down_proj", &[WIDTH, FFN]),
];

/// Writes a file of BF16 tensors.
fn write_shard(path: &Path, tensors: &[(String, Vec<u64>)], seed: u32) {
    let (mut header, mut at) = (Vec::new(), 0);
    for (name, shape) in tensors {
        let end = at + 2 * shape.iter().product::<u64>();
        header.push(format!(
            "\"{name}\":{{\"dtype\":\"BF16\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"
        ));
        at = end;
    }
    let header = format!("{{{}}}", header.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let mut state = seed;
    for _ in 0..at / 2 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Between 1/128 and 2, of both signs.
        let value = 0x3c00 + (state >> 24) as u16 * 4 + ((state >> 8) as u16 & 0x8003);
        bytes.extend(value.to_le_bytes());
    }
    fs::write(path, bytes).unwrap();
}

/// Directory with a shard per block, and one for the rest.
fn write_directory(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let stored = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../hearthnet-files/tests/data/hugging_face/llama31/config.json");
    let mut config = fs::read_to_string(stored).unwrap();
    for (key, old, new) in [
        ("hidden_size", 32, WIDTH),
        ("intermediate_size", 64, FFN),
        ("head_dim", 16, 64),
        ("num_attention_heads", 4, 8),
        ("num_hidden_layers", 2, LAYERS),
    ] {
        let line = |value| format!("\"{key}\": {value},");
        assert!(config.contains(&line(old)), "{key}");
        config = config.replace(&line(old), &line(new));
    }
    fs::write(folder.join("config.json"), config).unwrap();
    let mut map = Vec::new();
    let mut write = |file: String, tensors: Vec<(String, Vec<u64>)>, seed| {
        write_shard(&folder.join(&file), &tensors, seed);
        map.extend(
            tensors
                .iter()
                .map(|(name, _)| format!("\"{name}\":\"{file}\"")),
        );
    };
    for layer in 0..LAYERS {
        let name = |stem: &str| format!("model.layers.{layer}.{stem}.weight");
        let tensors = BLOCK
            .iter()
            .map(|(stem, shape)| (name(stem), shape.to_vec()));
        write(
            format!("m-{layer}.safetensors"),
            tensors.collect(),
            layer as u32,
        );
    }
    let rest = [
        ("model.embed_tokens.weight".to_owned(), vec![64, WIDTH]),
        ("model.norm.weight".to_owned(), vec![WIDTH]),
    ];
    write("m-rest.safetensors".to_owned(), rest.to_vec(), 9);
    let index = format!("{{\"weight_map\":{{{}}}}}", map.join(","));
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

/// Source bytes of a block.
fn block_bytes() -> u64 {
    let values = BLOCK.iter().map(|(_, shape)| shape.iter().product::<u64>());
    2 * values.sum::<u64>()
}

/// Directory, the file of which was adopted, and the folder of the parts of a node.
struct Adopted {
    home: TempDir,
    file: Vec<u8>,
    identity: Identity,
    manifest: Vec<u8>,
    pieces: Vec<u8>,
}

impl Adopted {
    fn new(dtype: Option<TensorType>) -> Self {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("directory");
        write_directory(&directory);
        let go_on = AtomicBool::new(false);
        let path = import(&directory, dtype, home.path(), &go_on, &mut |_, _| {}).unwrap();
        let model = ModelFile::open(&path).unwrap();
        let manifest = Manifest::of(&model, &mut |_, _| {});
        let (identity, pieces) = identity_of(&model, &manifest, &mut |_, _| {}).unwrap();
        Self {
            file: fs::read(&path).unwrap(),
            identity,
            manifest: manifest.encode(),
            pieces,
            home,
        }
    }

    fn directory(&self) -> PathBuf {
        self.home.path().join("directory")
    }

    fn parts(&self) -> PathBuf {
        self.home.path().join("parts")
    }

    fn part(&self) -> Part {
        let (identity, head) = (&self.identity, self.identity.head_bytes as usize);
        fs::create_dir_all(self.parts()).unwrap();
        let head = &self.file[..head];
        Part::create(&self.parts(), identity, head, &self.manifest, &self.pieces).unwrap()
    }

    fn at(&self, server: &Server) -> Source {
        let source = adopted_source(&format!("{}/d/config.json", server.address)).unwrap();
        let options = PullOptions::new(PathBuf::new());
        let directory = DirectorySource::at(&source, &options, &self.identity, &self.parts());
        Arc::new(directory)
    }

    fn assert_whole(&self, part: &Part) {
        assert_eq!(part.missing(&all(part)), []);
        for index in part.table().all() {
            let piece = part.table().piece(index).unwrap();
            let expected = &self.file[piece.offset as usize..][..piece.len as usize];
            assert!(
                part.read(index).unwrap().unwrap() == expected,
                "piece {index}"
            );
        }
    }
}

/// File server with byte ranges for a folder, at `/d/`. After `most` requests it answers with
/// status 503.
fn folder(path: &Path, most: usize) -> Answer {
    let (path, asked) = (path.to_owned(), AtomicUsize::new(0));
    Box::new(move |request: &Request, stream| {
        if asked.fetch_add(1, Ordering::Relaxed) >= most {
            return status("503 Service Unavailable")(request, stream);
        }
        let name = request.path.strip_prefix("/d/").unwrap();
        let Ok(bytes) = fs::read(path.join(name)) else {
            return status("404 Not Found")(request, stream);
        };
        let (from, last) = range_of(request);
        let last = last.min(bytes.len() as u64 - 1);
        let headers = [
            format!("Content-Length: {}", last - from + 1),
            format!("Content-Range: bytes {from}-{last}/{}", bytes.len()),
        ];
        let body = &bytes[from as usize..=last as usize];
        answer("206 Partial Content", &headers, body)(request, stream);
    })
}

/// First and last position of the requested range.
fn range_of(request: &Request) -> (u64, u64) {
    let range = request.headers["range"].strip_prefix("bytes=").unwrap();
    let (from, last) = range.split_once('-').unwrap();
    (from.parse().unwrap(), last.parse().unwrap())
}

/// Requested bytes of a file's weights, without its beginning.
fn asked_of(server: &Server, file: &str) -> u64 {
    let requests = server.requests().into_iter();
    let own = requests.filter(|request| request.path == format!("/d/{file}"));
    let ranges = own.map(|request| range_of(&request));
    let later = ranges.filter(|range| *range != (0, BEGIN - 1));
    later.map(|(from, last)| last - from + 1).sum()
}

#[test]
fn only_the_tensors_of_the_wanted_layers_are_asked_of_a_server() {
    for dtype in [None, Some(TensorType::Q8_0), Some(TensorType::Q4_K)] {
        let adopted = Adopted::new(dtype);
        let server = Server::new(vec![folder(&adopted.directory(), usize::MAX)]);
        let part = adopted.part();
        let wanted = part.table().of_layers(1, 1);
        let report = get(&part, &wanted, vec![adopted.at(&server)]).unwrap();
        assert_eq!(part.held(), wanted);
        assert_eq!(report.bytes[0].1, part.table().bytes(&wanted));
        for file in ["m-0.safetensors", "m-2.safetensors", "m-rest.safetensors"] {
            assert_eq!(asked_of(&server, file), 0, "{file}");
        }
        let asked = asked_of(&server, "m-1.safetensors");
        assert!(asked * 100 <= block_bytes() * 102, "{asked} for {dtype:?}");
        // The rest, with the embedding and the last norm.
        get(&part, &all(&part), vec![adopted.at(&server)]).unwrap();
        adopted.assert_whole(&part);
    }
}

#[test]
fn a_fetch_that_broke_off_asks_only_for_the_rest() {
    let adopted = Adopted::new(None);
    let part = adopted.part();
    let first = part.table().of_layers(0, 0);
    let server = Server::new(vec![folder(&adopted.directory(), usize::MAX)]);
    get(&part, &first, vec![adopted.at(&server)]).unwrap();
    // Six files are found, and three ranges of them are read.
    let busy = Server::new(vec![folder(&adopted.directory(), 9)]);
    let said = asked(get(&part, &all(&part), vec![adopted.at(&busy)]));
    assert!(said.contains("503"), "{said}");
    drop(part);

    let part = Part::open(&Part::folder_in(
        &adopted.parts(),
        &adopted.identity.weights,
    ))
    .unwrap();
    assert_eq!(part.missing(&first), []);
    let missing = part.table().bytes(&part.missing(&all(&part)));
    let server = Server::new(vec![folder(&adopted.directory(), usize::MAX)]);
    let report = get(&part, &all(&part), vec![adopted.at(&server)]).unwrap();
    assert_eq!(report.bytes[0].1, missing);
    assert_eq!(asked_of(&server, "m-0.safetensors"), 0);
    adopted.assert_whole(&part);
}

#[test]
fn a_directory_that_changes_between_two_ranges_is_refused_and_is_no_liar() {
    let adopted = Adopted::new(None);
    let server = Server::new(vec![folder(&adopted.directory(), usize::MAX)]);
    let part = adopted.part();
    let source = adopted.at(&server);
    let wanted = part.table().of_layers(0, 0);
    get(&part, &wanted, vec![Arc::clone(&source)]).unwrap();

    // The same tensors with other values.
    write_shard_of_layer(&adopted.directory(), 2, 77);
    let changed = part.table().of_layers(2, 2);
    let said = asked(get(&part, &changed, vec![Arc::clone(&source)]));
    assert!(said.contains("the directory has changed"), "{said}");
    assert!(!said.contains("is not the adopted model"), "{said}");

    // A file of another length.
    let path = adopted.directory().join("m-1.safetensors");
    let longer = [fs::read(&path).unwrap(), vec![0]].concat();
    fs::write(&path, &longer).unwrap();
    let said = asked(get(&part, &part.table().of_layers(1, 1), vec![source]));
    assert!(
        said.contains(&format!("has {} bytes instead of", longer.len())),
        "{said}"
    );
    assert_eq!(part.missing(&wanted), []);
}

fn write_shard_of_layer(directory: &Path, layer: u64, seed: u32) {
    let name = |stem: &str| format!("model.layers.{layer}.{stem}.weight");
    let tensors = BLOCK
        .iter()
        .map(|(stem, shape)| (name(stem), shape.to_vec()));
    let path = directory.join(format!("m-{layer}.safetensors"));
    write_shard(&path, &tensors.collect::<Vec<_>>(), seed);
}

#[test]
fn a_server_that_lacks_the_directory_or_has_another_model_is_refused() {
    let adopted = Adopted::new(None);
    let part = adopted.part();
    let empty = tempfile::tempdir().unwrap();
    let server = Server::new(vec![folder(empty.path(), usize::MAX)]);
    let said = asked(get(&part, &all(&part), vec![adopted.at(&server)]));
    assert!(said.contains("it has no config.json"), "{said}");
    let other = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../hearthnet-files/tests/data/hugging_face/llama31");
    let server = Server::new(vec![folder(&other, usize::MAX)]);
    let said = asked(get(&part, &all(&part), vec![adopted.at(&server)]));
    assert!(said.contains("it is not the adopted model"), "{said}");
    assert_eq!(part.held(), []);
}

#[test]
fn a_folder_of_this_machine_completes_a_part_and_has_no_objects() {
    for dtype in [None, Some(TensorType::Q4_1)] {
        let adopted = Adopted::new(dtype);
        let folder = adopted.directory();
        let local = LocalSource::new(&folder, &adopted.identity, &adopted.parts());
        local.open().unwrap();
        for object in [Object::Head, Object::Manifest, Object::PieceList] {
            assert_eq!(local.object(object, 0, 1000).unwrap(), None);
        }
        let part = adopted.part();
        get(&part, &all(&part), vec![Arc::new(local)]).unwrap();
        adopted.assert_whole(&part);
    }
}
