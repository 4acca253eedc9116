//! Pieces of an adopted model from a Hugging Face directory, over HTTP and in a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hearthnet_files::ModelFile;
use hearthnet_files::gguf::TensorType;
use hearthnet_files::hugging_face::import;
use hearthnet_files::part::Part;
use hearthnet_hub::parts::{DirectorySource, LocalSource, Object, PieceSource};
use hearthnet_hub::pull::PullOptions;
use hearthnet_hub::reference::adopted_source;
use hearthnet_testkit::{Adopted, TempDir, TinyDirectory};

use super::parts::{Source, all, asked, get};
use super::server::{Answer, Request, Server, answer, ranges, status};

const DIRECTORY: TinyDirectory = TinyDirectory { layers: 3, seed: 1 };
/// Bytes of a file's beginning that are asked for with its length.
const BEGIN: u64 = 16 << 10;

/// Directory, and the file that it becomes as the adopted model.
fn adopted(dtype: Option<TensorType>) -> (TempDir, Adopted) {
    let (directory, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    DIRECTORY.write(directory.path());
    let (go_on, from) = (AtomicBool::new(false), directory.path());
    let path = import(from, dtype, cache.path(), &go_on, &mut |_, _| {}).unwrap();
    // The mapped file can be read after its folder is removed.
    (directory, Adopted::of(ModelFile::open(&path).unwrap()))
}

fn at(server: &Server, adopted: &Adopted) -> Source {
    let source = adopted_source(&format!("{}/d/config.json", server.address)).unwrap();
    let options = PullOptions::new(PathBuf::new());
    let (identity, parts) = (&adopted.identity, adopted.parts.path());
    Arc::new(DirectorySource::at(&source, &options, identity, parts))
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
        match fs::read(path.join(name)) {
            Ok(bytes) => ranges(&bytes)(request, stream),
            Err(_) => status("404 Not Found")(request, stream),
        }
    })
}

/// Requested bytes of a file's weights, without its beginning.
fn asked_of(server: &Server, file: &str) -> u64 {
    let requests = server.requests().into_iter();
    let own = requests.filter(|request| request.path == format!("/d/{file}"));
    let ranges = own.map(|request| request.range().unwrap());
    let ranges = ranges.map(|(from, last)| (from as u64, last.unwrap() as u64));
    let later = ranges.filter(|range| *range != (0, BEGIN - 1));
    later.map(|(from, last)| last - from + 1).sum()
}

#[test]
fn only_the_tensors_of_the_wanted_layers_are_asked_of_a_server() {
    for dtype in [None, Some(TensorType::Q8_0), Some(TensorType::Q4_K)] {
        let (directory, adopted) = adopted(dtype);
        let server = Server::new(vec![folder(directory.path(), usize::MAX)]);
        let part = adopted.create().unwrap();
        let wanted = part.table().of_layers(1, 1);
        let report = get(&part, &wanted, vec![at(&server, &adopted)]).unwrap();
        assert_eq!(part.held(), wanted);
        assert_eq!(report.bytes[0].1, part.table().bytes(&wanted));
        let of_block = |layer| asked_of(&server, &TinyDirectory::file_of(layer));
        let others = of_block(0) + of_block(2) + asked_of(&server, TinyDirectory::REST);
        assert_eq!(others, 0);
        let (asked, needed) = (of_block(1), TinyDirectory::block_bytes());
        assert!(asked * 100 <= needed * 102, "{asked} for {dtype:?}");
        assert!(asked + BEGIN >= needed, "{asked} for {dtype:?}");
        // The rest, with the embedding and the last norm.
        get(&part, &all(&part), vec![at(&server, &adopted)]).unwrap();
        adopted.assert_holds(&part, &all(&part));
    }
}

#[test]
fn a_fetch_that_broke_off_asks_only_for_the_rest() {
    let (directory, adopted) = adopted(None);
    let part = adopted.create().unwrap();
    let first = part.table().of_layers(0, 0);
    let server = Server::new(vec![folder(directory.path(), usize::MAX)]);
    get(&part, &first, vec![at(&server, &adopted)]).unwrap();
    // Six files are found, and three ranges of them are read.
    let busy = Server::new(vec![folder(directory.path(), 9)]);
    let said = asked(get(&part, &all(&part), vec![at(&busy, &adopted)]));
    assert!(said.contains("503"), "{said}");
    drop(part);

    let part = Part::open(&adopted.path()).unwrap();
    assert_eq!(part.missing(&first), []);
    let missing = part.table().bytes(&part.missing(&all(&part)));
    let server = Server::new(vec![folder(directory.path(), usize::MAX)]);
    let report = get(&part, &all(&part), vec![at(&server, &adopted)]).unwrap();
    assert_eq!(report.bytes[0].1, missing);
    assert_eq!(asked_of(&server, &TinyDirectory::file_of(0)), 0);
    adopted.assert_holds(&part, &all(&part));
}

#[test]
fn a_directory_that_changes_between_two_ranges_is_refused_and_is_no_liar() {
    let (directory, adopted) = adopted(None);
    let server = Server::new(vec![folder(directory.path(), usize::MAX)]);
    let part = adopted.create().unwrap();
    let source = at(&server, &adopted);
    let wanted = part.table().of_layers(0, 0);
    get(&part, &wanted, vec![Arc::clone(&source)]).unwrap();

    // The same tensors with other values.
    let other = TinyDirectory {
        seed: 77,
        ..DIRECTORY
    };
    other.write_block(directory.path(), 2);
    let changed = part.table().of_layers(2, 2);
    let said = asked(get(&part, &changed, vec![Arc::clone(&source)]));
    assert!(said.contains("the directory has changed"), "{said}");
    assert!(!said.contains("is not the adopted model"), "{said}");

    // A file of another length.
    let path = directory.path().join(TinyDirectory::file_of(1));
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
    let (_directory, adopted) = adopted(None);
    let part = adopted.create().unwrap();
    let empty = tempfile::tempdir().unwrap();
    let server = Server::new(vec![folder(empty.path(), usize::MAX)]);
    let said = asked(get(&part, &all(&part), vec![at(&server, &adopted)]));
    assert!(said.contains("it has no config.json"), "{said}");
    let other = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../hearthnet-files/tests/data/hugging_face/llama31");
    let server = Server::new(vec![folder(&other, usize::MAX)]);
    let said = asked(get(&part, &all(&part), vec![at(&server, &adopted)]));
    assert!(said.contains("it is not the adopted model"), "{said}");
    assert_eq!(part.held(), []);
}

#[test]
fn a_folder_of_this_machine_completes_a_part_and_has_no_objects() {
    for dtype in [None, Some(TensorType::Q4_1)] {
        let (directory, adopted) = adopted(dtype);
        let (folder, parts) = (directory.path(), adopted.parts.path());
        let local = LocalSource::new(folder, &adopted.identity, parts);
        local.open().unwrap();
        for object in [Object::Head, Object::Manifest, Object::PieceList] {
            assert_eq!(local.object(object, 0, 1000).unwrap(), None);
        }
        let part = adopted.create().unwrap();
        get(&part, &all(&part), vec![Arc::new(local)]).unwrap();
        adopted.assert_holds(&part, &all(&part));
    }
}

#[test]
fn a_server_without_byte_ranges_is_refused() {
    let (directory, adopted) = adopted(None);
    let path = directory.path().to_owned();
    // It sends the small files, as the hub may, and all weights.
    let whole: Answer = Box::new(move |request: &Request, stream| {
        let name = request.path.strip_prefix("/d/").unwrap();
        let bytes = fs::read(path.join(name)).unwrap();
        let length = format!("Content-Length: {}", bytes.len());
        answer("200 OK", &[length], &bytes)(request, stream);
    });
    let server = Server::new(vec![whole]);
    let part = adopted.create().unwrap();
    let said = asked(get(&part, &all(&part), vec![at(&server, &adopted)]));
    assert!(said.contains("does not support byte ranges"), "{said}");
    let names = server.requests().into_iter().map(|request| request.path);
    let index = "/d/model.safetensors.index.json".to_owned();
    assert!(names.collect::<Vec<_>>().contains(&index));
}
