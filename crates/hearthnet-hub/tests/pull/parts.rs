//! Pieces of a model, from an HTTP server, files, folders and neighbours, into parts on the disk.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hearthnet_files::part::{Identity, MAX_HEAD_BYTES, Part, PartError, Piece};
use hearthnet_files::{Manifest, WeightsId};
use hearthnet_hub::ModelRef;
use hearthnet_hub::parts::{
    FetchError, FetchOptions, FileSource, FolderSource, HubSource, LocalSource, Object,
    PieceSource, Progress, Rank, Report, SourceError, fetch, first_contact,
};
use hearthnet_hub::pull::PullOptions;
use hearthnet_testkit::{Adopted, TinyLlama, assert_matches};
use parking_lot::Mutex;

use super::server::{self, Answer, Server, answer, busy, redirect};

/// Model with tensors of several pieces.
fn tiny(seed: u64) -> TinyLlama {
    TinyLlama {
        layers: 3,
        width: 256,
        ffn: 1536,
        vocab: 2048,
        weights: "q8_0",
        tied: false,
        seed,
        ..TinyLlama::default()
    }
}

pub(crate) type Source = Arc<dyn PieceSource>;

/// File server of ranges within `file`, which panics if it is asked for anything else.
fn range_up_to(file: &[u8], most: usize) -> Answer {
    let (len, answer) = (file.len(), server::range_up_to(file, most));
    Box::new(move |request, stream| {
        let range = request.range();
        let is_within = range.is_some_and(|(_, last)| last.is_some_and(|last| last < len));
        assert!(is_within, "{range:?} of {len}");
        answer(request, stream);
    })
}

fn ranges(file: &[u8]) -> Answer {
    range_up_to(file, usize::MAX)
}

fn adopted() -> Adopted {
    Adopted::of(tiny(1).file())
}

fn contact(adopted: &Adopted, sources: &[Source]) -> Result<Part, FetchError> {
    let (parts, stop) = (adopted.parts.path(), AtomicBool::new(false));
    first_contact(parts, &adopted.identity, sources, &|_| {}, &stop)
}

/// Source of the model at an address.
fn at(server: &Server, adopted: &Adopted) -> Source {
    let text = format!("{}/m.gguf", server.address);
    let Ok(ModelRef::Remote(source)) = text.parse() else {
        panic!("{text}");
    };
    let options = PullOptions::new(PathBuf::new());
    Arc::new(HubSource::new(&source, &options, adopted.identity.file_bytes).unwrap())
}

/// Source of a file or folder on this machine.
fn local(path: &Path, adopted: &Adopted) -> LocalSource {
    LocalSource::new(path, &adopted.identity, adopted.parts.path())
}

/// Model file in the folder of the parts.
fn on_disk(adopted: &Adopted, bytes: &[u8]) -> PathBuf {
    let path = adopted.parts.path().join("m.gguf");
    fs::write(&path, bytes).unwrap();
    path
}

pub(crate) fn get(
    part: &Part,
    wanted: &[Range<u32>],
    sources: Vec<Source>,
) -> Result<Report, FetchError> {
    let options = FetchOptions {
        backoff: Duration::from_millis(1),
        poll: Duration::from_millis(20),
        patience: Duration::from_secs(1),
        ..FetchOptions::default()
    };
    let stop = AtomicBool::new(false);
    fetch(part, wanted, sources, &options, &|_| {}, &stop)
}

pub(crate) fn all(part: &Part) -> Vec<Range<u32>> {
    vec![part.table().all()]
}

/// Member of the community that has the whole model, in memory.
struct Neighbour {
    name: &'static str,
    file: Vec<u8>,
    /// Head, manifest, piece list.
    objects: [Vec<u8>; 3],
    asked: AtomicU32,
    on_object: Box<dyn Fn() + Send + Sync>,
}

impl Neighbour {
    fn of(adopted: &Adopted) -> Self {
        let manifest = adopted.manifest.encode();
        Self {
            name: "neighbour",
            file: adopted.file.clone(),
            objects: [adopted.head().to_vec(), manifest, adopted.pieces.clone()],
            asked: AtomicU32::new(0),
            on_object: Box::new(|| {}),
        }
    }
}

impl PieceSource for Neighbour {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn rank(&self) -> Rank {
        Rank::Neighbour
    }

    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError> {
        Ok(std::iter::once(0..u32::MAX).collect())
    }

    fn lanes(&self) -> usize {
        4
    }

    fn run(&self) -> u32 {
        1
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        let bytes = run
            .iter()
            .map(|piece| &self.file[piece.offset as usize..][..piece.len as usize]);
        Ok(Some(bytes.collect::<Vec<_>>().concat()))
    }

    fn object(&self, object: Object, from: u64, len: u32) -> Result<Option<Vec<u8>>, SourceError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        (self.on_object)();
        let [head, manifest, pieces] = &self.objects;
        let bytes = match object {
            Object::Head => head,
            Object::Manifest => manifest,
            Object::PieceList => pieces,
        };
        let rest = &bytes[(from as usize).min(bytes.len())..];
        // Shorter than asked for, as the protocol between nodes allows.
        Ok(Some(
            rest[..rest.len().min(len.min(1000) as usize)].to_vec(),
        ))
    }
}

/// Error about the only source of a fetch that found it unusable.
pub(crate) fn asked(result: Result<Report, FetchError>) -> String {
    match result {
        Err(FetchError::NoSource { mut asked, .. }) if asked.len() == 1 => asked.remove(0),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_server_with_byte_ranges_completes_a_part_that_opens_as_the_model() {
    let adopted = adopted();
    let server = Server::new(vec![ranges(&adopted.file)]);
    let part = Arc::new(adopted.create().unwrap());
    let report = get(&part, &all(&part), vec![at(&server, &adopted)]).unwrap();
    adopted.assert_holds(&part, &all(&part));
    assert_eq!(report.bytes[0].1, part.table().bytes(&all(&part)));
    let model = part.model_file().unwrap();
    assert_eq!(Manifest::of(&model, &mut |_, _| {}), adopted.manifest);
}

#[test]
fn only_the_wanted_layers_are_fetched() {
    let adopted = adopted();
    let server = Server::new(vec![ranges(&adopted.file)]);
    let part = adopted.create().unwrap();
    let wanted = part.table().of_layers(1, 1);
    let report = get(&part, &wanted, vec![at(&server, &adopted)]).unwrap();
    adopted.assert_holds(&part, &wanted);
    assert_eq!(part.held(), wanted);
    assert_eq!(report.bytes[0].1, part.table().bytes(&wanted));
}

#[test]
fn a_server_without_byte_ranges_is_refused_by_name() {
    let adopted = adopted();
    let length = format!("Content-Length: {}", adopted.file.len());
    let server = Server::new(vec![answer("200 OK", &[length], &adopted.file)]);
    let part = adopted.create().unwrap();
    let said = asked(get(&part, &all(&part), vec![at(&server, &adopted)]));
    assert!(said.starts_with(&server.address), "{said}");
    assert!(said.contains("does not support byte ranges"), "{said}");
    assert_eq!(part.held(), []);
}

#[test]
fn a_file_that_changes_between_two_ranges_is_not_the_adopted_model() {
    let adopted = adopted();
    let mut other = adopted.file.clone();
    other.iter_mut().for_each(|byte| *byte ^= 1);
    let server = Server::new(vec![ranges(&adopted.file), ranges(&other)]);
    let part = adopted.create().unwrap();
    // The first answer is for the last piece alone. The others are asked for in several requests at
    // once, of which any may come first.
    let last = part.table().all().end - 1;
    let genuine: Vec<_> = std::iter::once(last..last + 1).collect();
    get(&part, &genuine, vec![at(&server, &adopted)]).unwrap();
    let said = asked(get(&part, &all(&part), vec![at(&server, &adopted)]));
    assert!(
        said.contains(&format!(
            "{}/m.gguf is not the adopted model",
            server.address
        )),
        "{said}"
    );
    assert_eq!(part.held(), genuine);
    adopted.assert_holds(&part, &genuine);
}

#[test]
fn a_file_that_changes_its_length_is_refused() {
    let adopted = adopted();
    let longer = [&adopted.file[..], b"more"].concat();
    let server = Server::new(vec![ranges(&adopted.file), ranges(&longer)]);
    let part = adopted.create().unwrap();
    let said = asked(get(&part, &all(&part), vec![at(&server, &adopted)]));
    let expected = format!("{} bytes instead of {}", longer.len(), adopted.file.len());
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn a_truncated_body_is_asked_again_and_its_bytes_are_counted() {
    let adopted = adopted();
    let server = Server::new(vec![
        range_up_to(&adopted.file, 1000),
        ranges(&adopted.file),
    ]);
    let part = adopted.create().unwrap();
    let report = get(&part, &all(&part), vec![at(&server, &adopted)]).unwrap();
    adopted.assert_holds(&part, &all(&part));
    assert_eq!(report.bytes[0].1, part.table().bytes(&all(&part)) + 1000);
}

#[test]
fn a_busy_server_is_asked_again_after_its_time() {
    let adopted = adopted();
    for status in ["429 Too Many Requests", "503 Service Unavailable"] {
        let server = Server::new(vec![busy(status, "1"), ranges(&adopted.file)]);
        let part = adopted.create().unwrap();
        part.evict(&all(&part)).unwrap();
        assert_eq!(part.held(), []);
        get(&part, &all(&part), vec![at(&server, &adopted)]).unwrap();
        adopted.assert_holds(&part, &all(&part));
    }
}

#[test]
fn a_server_that_is_busy_for_too_long_is_given_up_at_once() {
    let adopted = adopted();
    let server = Server::new(vec![busy("503 Service Unavailable", "3600")]);
    let part = adopted.create().unwrap();
    let said = asked(get(&part, &all(&part), vec![at(&server, &adopted)]));
    assert!(said.contains("retry after 3600 s"), "{said}");
    // One request per lane.
    assert!(server.requests().len() <= 4, "{}", server.requests().len());
}

#[test]
fn ranges_are_asked_for_at_the_target_of_a_redirect() {
    let adopted = adopted();
    let target = Server::new(vec![ranges(&adopted.file)]);
    let server = Server::new(vec![redirect(&format!("{}/elsewhere", target.address))]);
    let part = adopted.create().unwrap();
    get(&part, &all(&part), vec![at(&server, &adopted)]).unwrap();
    adopted.assert_holds(&part, &all(&part));
    assert!(
        target
            .requests()
            .iter()
            .all(|request| request.path == "/elsewhere")
    );
}

#[test]
fn a_model_file_on_a_drive_is_the_only_source_that_is_needed() {
    let adopted = adopted();
    let path = on_disk(&adopted, &adopted.file);
    let source: Source = Arc::new(FileSource::open(&path, &adopted.identity).unwrap());
    let part = contact(&adopted, &[Arc::clone(&source)]).unwrap();
    get(&part, &all(&part), vec![source]).unwrap();
    adopted.assert_holds(&part, &all(&part));
}

#[test]
fn another_file_at_the_path_of_a_drive_is_hashed_again() {
    let adopted = adopted();
    let path = on_disk(&adopted, &adopted.file);
    let local = local(&path, &adopted);
    let list = |source: &LocalSource| {
        let list = source.object(Object::PieceList, 0, u32::MAX);
        list.unwrap().unwrap()
    };
    assert_eq!(list(&local), adopted.pieces);
    assert_eq!(list(&local.again()), adopted.pieces);
    let mut changed = adopted.file.clone();
    let middle = changed.len() / 2;
    changed[middle] ^= 1;
    let other = path.with_extension("new");
    fs::write(&other, &changed).unwrap();
    fs::rename(&other, &path).unwrap();
    assert_ne!(list(&local.again()), adopted.pieces);
}

#[test]
fn another_file_on_a_drive_is_refused_by_its_length_its_metadata_or_its_contents() {
    let adopted = adopted();
    let path = on_disk(&adopted, &tiny(2).bytes());
    let refused = |identity| {
        let opened = FileSource::open(&path, &identity).map(|_| ());
        opened.unwrap_err().to_string()
    };
    let longer = Identity {
        file_bytes: adopted.identity.file_bytes + 1,
        ..adopted.identity
    };
    let said = refused(longer);
    let expected = format!("instead of {}", longer.file_bytes);
    assert!(said.contains(&expected), "{said}");
    let named = Identity {
        head: adopted.identity.pieces,
        ..adopted.identity
    };
    let said = refused(named);
    assert!(said.contains("its metadata differ"), "{said}");
    let source: Source = Arc::new(FileSource::open(&path, &adopted.identity).unwrap());
    let part = adopted.create().unwrap();
    let said = asked(get(&part, &all(&part), vec![source]));
    assert!(said.contains("m.gguf is not the adopted model"), "{said}");
    assert_eq!(part.held(), []);
}

#[test]
fn a_part_in_another_folder_gives_what_it_holds() {
    let adopted = adopted();
    let drive = tempfile::tempdir().unwrap();
    let theirs = adopted.create_in(drive.path()).unwrap();
    let layers = theirs.table().of_layers(0, 1);
    get(&theirs, &layers, vec![Arc::new(Neighbour::of(&adopted))]).unwrap();
    let source: Source =
        Arc::new(FolderSource::open(theirs.folder(), &adopted.identity.weights).unwrap());
    let part = contact(&adopted, &[Arc::clone(&source)]).unwrap();
    get(&part, &layers, vec![Arc::clone(&source)]).unwrap();
    adopted.assert_holds(&part, &layers);
    let said = asked(get(&part, &all(&part), vec![source]));
    let lacks = part.table().bytes(&part.missing(&all(&part)));
    assert!(said.ends_with(&format!("lacks {lacks} bytes")), "{said}");
}

#[test]
fn a_drive_with_a_file_or_a_part_in_any_of_its_places_is_a_source() {
    let adopted = adopted();
    let drive = tempfile::tempdir().unwrap();
    let path = |name: &str| drive.path().join(name);
    let opens = |name: &str| local(&path(name), &adopted).open();
    let nothing = opens("").unwrap_err().to_string();
    assert!(nothing.contains("neither the file"), "{nothing}");
    assert_matches!(opens("none"), Err(SourceError::Io(_)));
    fs::write(path("other.gguf"), &adopted.file[1..]).unwrap();
    fs::write(path("m.gguf"), &adopted.file).unwrap();
    opens("m.gguf").unwrap();
    opens("").unwrap();
    let said = opens("other.gguf").unwrap_err().to_string();
    assert!(said.contains("another file than the adopted"), "{said}");
    fs::remove_file(path("m.gguf")).unwrap();
    // A part that has only some layers.
    let theirs = tempfile::tempdir_in(drive.path()).unwrap();
    let parts = theirs.path().join("parts");
    fs::create_dir(&parts).unwrap();
    let part = adopted.create_in(&parts).unwrap();
    let layer = part.table().of_layers(1, 1);
    get(&part, &layer, vec![Arc::new(Neighbour::of(&adopted))]).unwrap();
    for place in [theirs.path(), &parts, part.folder(), &part.path()] {
        let source = local(place, &adopted);
        assert_eq!(source.pieces().unwrap(), layer, "{}", place.display());
    }
}

#[test]
fn a_fetch_from_a_drive_that_is_pulled_out_goes_on_from_others_or_later() {
    let adopted = adopted();
    let path = on_disk(&adopted, &adopted.file);
    let half = adopted.identity.file_bytes / 2;
    // Its file is open when its second half goes away.
    let pulled = || -> Source {
        fs::write(&path, &adopted.file).unwrap();
        let local = local(&path, &adopted);
        local.open().unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(half).unwrap();
        Arc::new(local)
    };
    let part = adopted.create().unwrap();
    let said = asked(get(&part, &all(&part), vec![pulled()]));
    assert!(said.contains("m.gguf: it cannot be read"), "{said}");
    fs::write(&path, &adopted.file).unwrap();
    let again: Source = Arc::new(local(&path, &adopted));
    get(&part, &all(&part), vec![again]).unwrap();
    adopted.assert_holds(&part, &all(&part));

    part.evict(&all(&part)).unwrap();
    let neighbour = Arc::new(Neighbour::of(&adopted));
    let report = get(&part, &all(&part), vec![pulled(), neighbour]).unwrap();
    adopted.assert_holds(&part, &all(&part));
    assert_eq!(report.dropped.len(), 1);
    assert!(report.bytes[1].1 >= half / 2, "{:?}", report.bytes);
}

#[test]
fn a_file_that_a_person_names_spares_the_neighbours() {
    let adopted = adopted();
    let path = on_disk(&adopted, &adopted.file);
    let local: Source = Arc::new(local(&path, &adopted));
    let part = adopted.create().unwrap();
    let neighbour: Source = Arc::new(Neighbour::of(&adopted));
    let report = get(&part, &all(&part), vec![neighbour, local]).unwrap();
    adopted.assert_holds(&part, &all(&part));
    assert_eq!(report.bytes[0].1, 0);
}

#[test]
fn a_folder_of_another_model_is_refused() {
    let adopted = adopted();
    let part = adopted.create().unwrap();
    let refused = FolderSource::open(part.folder(), &WeightsId::of(b"other")).map(|_| ());
    assert_matches!(refused, Err(SourceError::Unusable(why)) if why.contains("another model"));
}

#[test]
fn a_new_model_is_met_and_completed_through_a_neighbour_and_the_hub() {
    let adopted = adopted();
    let neighbour = Arc::new(Neighbour::of(&adopted));
    let server = Server::new(vec![ranges(&adopted.file)]);
    let sources: Vec<Source> = vec![at(&server, &adopted), Arc::<Neighbour>::clone(&neighbour)];
    let part = contact(&adopted, &sources).unwrap();
    get(&part, &all(&part), sources).unwrap();
    adopted.assert_holds(&part, &all(&part));
    // The neighbour has everything, so the hub is spared.
    assert_eq!(server.requests().len(), 0);
    drop(part);
    // Once met, no source is needed.
    let part = contact(&adopted, &[]).unwrap();
    assert_eq!(part.missing(&all(&part)), []);
    assert_matches!(
        contact(&adopted, &[]),
        Err(FetchError::Part(PartError::InUse(_)))
    );
}

#[test]
fn wrong_objects_are_named_and_taken_from_the_next_source() {
    let adopted = adopted();
    for wrong in 0..3 {
        let mut liar = Neighbour::of(&adopted);
        liar.name = "liar";
        liar.objects[wrong][40] ^= 1;
        let parts = tempfile::tempdir().unwrap();
        let said = Mutex::new(Vec::new());
        let news = |progress: Progress<'_>| {
            if let Progress::Dropped(dropped) = progress {
                said.lock().push(dropped.to_string());
            }
        };
        let sources: [Source; 2] = [Arc::new(liar), Arc::new(Neighbour::of(&adopted))];
        let (identity, stop) = (&adopted.identity, AtomicBool::new(false));
        first_contact(parts.path(), identity, &sources, &news, &stop).unwrap();
        let object = ["head", "manifest", "piece list"][wrong];
        let expected = format!("liar sent wrong bytes for the {object}");
        let said = said.into_inner();
        assert!(
            said.len() == 1 && said[0].starts_with(&expected),
            "{said:?}"
        );
    }
}

#[test]
fn a_model_whose_objects_no_source_has_is_refused_with_all_that_were_asked() {
    let adopted = adopted();
    let mut shorter = Neighbour::of(&adopted);
    shorter.name = "shorter";
    shorter.objects[1].truncate(100);
    let server = Server::new(vec![ranges(&adopted.file)]);
    let sources: [Source; 2] = [Arc::new(shorter), at(&server, &adopted)];
    let error = contact(&adopted, &sources).unwrap_err();
    assert_matches!(&error, FetchError::NoObject { object: Object::Manifest, asked } if asked.len() == 2);
    let said = error.to_string();
    assert!(
        said.contains("shorter: its manifest has another length"),
        "{said}"
    );
    assert!(said.contains("m.gguf does not have it"), "{said}");
}

#[test]
fn lengths_beyond_the_limits_are_refused_before_a_source_is_asked() {
    let mut adopted = adopted();
    let neighbour = Arc::new(Neighbour::of(&adopted));
    adopted.identity.head_bytes = MAX_HEAD_BYTES + 1;
    let sources: [Source; 1] = [Arc::<Neighbour>::clone(&neighbour)];
    let refused = contact(&adopted, &sources).map(|_| ());
    assert_matches!(refused, Err(FetchError::Part(PartError::Disagrees(why))) if why.contains("head"));
    adopted.identity.head_bytes = 1000;
    adopted.identity.manifest_bytes = u64::MAX;
    let refused = contact(&adopted, &sources).map(|_| ());
    assert_matches!(refused, Err(FetchError::Part(PartError::Disagrees(why))) if why.contains("manifest"));
    assert_eq!(neighbour.asked.load(Ordering::Relaxed), 0);
}

#[test]
fn a_file_that_is_too_short_for_its_pieces_contradicts_itself() {
    let mut adopted = adopted();
    let neighbour = Arc::new(Neighbour::of(&adopted));
    adopted.identity.file_bytes = 3;
    let refused = contact(&adopted, &[neighbour]).map(|_| ());
    assert_matches!(refused, Err(FetchError::Part(PartError::Disagrees(why))) if why.contains("more pieces"));
}

#[test]
fn a_stop_ends_the_first_contact_before_the_next_read() {
    let adopted = adopted();
    let stop = Arc::new(AtomicBool::new(false));
    let mut neighbour = Neighbour::of(&adopted);
    let stops = Arc::clone(&stop);
    neighbour.on_object = Box::new(move || stops.store(true, Ordering::Relaxed));
    let neighbour = Arc::new(neighbour);
    let sources: [Source; 1] = [Arc::<Neighbour>::clone(&neighbour)];
    let (parts, identity) = (adopted.parts.path(), &adopted.identity);
    let stopped = first_contact(parts, identity, &sources, &|_| {}, &stop).map(|_| ());
    assert_matches!(stopped, Err(FetchError::Stopped));
    assert_eq!(neighbour.asked.load(Ordering::Relaxed), 1);
}
