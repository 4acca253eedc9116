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
use hearthnet_testkit::TinyDirectory;
use tempfile::TempDir;

use super::parts::{Source, all, asked, get};
use super::server::{Answer, Request, Server, answer, status};

const DIRECTORY: TinyDirectory = TinyDirectory { layers: 3, seed: 1 };
/// Bytes of a file's beginning that are asked for with its length.
const BEGIN: u64 = 16 << 10;

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
        DIRECTORY.write(&directory);
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
        let of_block = |layer| asked_of(&server, &TinyDirectory::file_of(layer));
        let others = of_block(0) + of_block(2) + asked_of(&server, TinyDirectory::REST);
        assert_eq!(others, 0);
        let (asked, needed) = (of_block(1), TinyDirectory::block_bytes());
        assert!(asked * 100 <= needed * 102, "{asked} for {dtype:?}");
        assert!(asked + BEGIN >= needed, "{asked} for {dtype:?}");
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
    assert_eq!(asked_of(&server, &TinyDirectory::file_of(0)), 0);
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
    let other = TinyDirectory {
        seed: 77,
        ..DIRECTORY
    };
    other.write_block(&adopted.directory(), 2);
    let changed = part.table().of_layers(2, 2);
    let said = asked(get(&part, &changed, vec![Arc::clone(&source)]));
    assert!(said.contains("the directory has changed"), "{said}");
    assert!(!said.contains("is not the adopted model"), "{said}");

    // A file of another length.
    let path = adopted.directory().join(TinyDirectory::file_of(1));
    let longer = [fs::read(&path).unwrap(), vec![0]].concat();
    fs::write(&path, &longer).unwrap();
    let said = asked(get(&part, &part.table().of_layers(1, 1), vec![source]));
    assert!(
        said.contains(&format!("has {} bytes instead of", longer.len())),
        "{said}"
    );
    assert_eq!(part.missing(&wanted), []);
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

#[test]
fn a_server_without_byte_ranges_is_refused() {
    let adopted = Adopted::new(None);
    let path = adopted.directory();
    // It sends the small files, as the hub may, and all weights.
    let whole: Answer = Box::new(move |request: &Request, stream| {
        let name = request.path.strip_prefix("/d/").unwrap();
        let bytes = fs::read(path.join(name)).unwrap();
        let length = format!("Content-Length: {}", bytes.len());
        answer("200 OK", &[length], &bytes)(request, stream);
    });
    let server = Server::new(vec![whole]);
    let part = adopted.part();
    let said = asked(get(&part, &all(&part), vec![adopted.at(&server)]));
    assert!(said.contains("does not support byte ranges"), "{said}");
    let names = server.requests().into_iter().map(|request| request.path);
    let index = "/d/model.safetensors.index.json".to_owned();
    assert!(names.collect::<Vec<_>>().contains(&index));
}
