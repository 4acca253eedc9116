//! Parts of models: a folder that holds some pieces of a file.
#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)] // in helpers, where a failure fails the test

use std::fs;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use hearthnet_files::joined::open_joined_at;
use hearthnet_files::manifest::{VerifyError, pieces_path};
use hearthnet_files::part::{
    Identity, MAX_HEAD_BYTES, PIECE_BYTES, Part, PartError, identity_of, objects_of, open_model,
    piece_count, stored_identity,
};
use hearthnet_files::spec::CacheDtype;
use hearthnet_files::{Digest, Manifest, ModelError, ModelFile, WeightsId};
use hearthnet_testkit::{Adopted, TempDir, TinyLlama, assert_matches, rows};

/// Model with tensors of several pieces.
fn large() -> TinyLlama {
    TinyLlama {
        layers: 4,
        width: 256,
        ffn: 1536,
        vocab: 2048,
        weights: "q8_0",
        tied: false,
        ..TinyLlama::default()
    }
}

/// Adopted model of the same tensors with another description, at the same places.
fn with_another_head(parts: TempDir) -> Adopted {
    let mut adopted = Adopted::of(large().file());
    let mut windows = adopted.file.windows(4);
    let name = windows.position(|window| window == b"Tiny").unwrap();
    adopted.file[name] = b'S';
    adopted.identity.head = Digest::of(adopted.head());
    adopted.parts = parts;
    adopted
}

/// Writes the model file beside the part.
fn whole_file(adopted: &Adopted) -> PathBuf {
    let path = adopted.parts.path().join("whole.gguf");
    fs::write(&path, &adopted.file).unwrap();
    path
}

fn each(ranges: &[Range<u32>]) -> Vec<u32> {
    ranges.iter().cloned().flatten().collect()
}

#[test]
fn pieces_are_cut_from_each_tensor_in_the_order_of_names() {
    let adopted = Adopted::of(large().file());
    // Computed again, from the document alone.
    let mut infos: Vec<_> = adopted.model.gguf().tensors().iter().collect();
    infos.sort_by(|a, b| a.name.as_bytes().cmp(b.name.as_bytes()));
    let (mut list, mut places) = (Vec::new(), Vec::new());
    for info in infos {
        let mut at = 0;
        while at < info.bytes {
            let end = info.bytes.min(at + 262_144);
            let begin = info.offset + at;
            let data = &adopted.file[begin as usize..(info.offset + end) as usize];
            list.extend(Digest::of(data).0);
            places.push((begin, end - at));
            at = end;
        }
    }
    assert_eq!(adopted.pieces, list);
    assert_eq!(adopted.identity.pieces, Digest::of(&list));
    let count = |file_bytes| piece_count(&adopted.manifest, file_bytes);
    assert_eq!(
        count(adopted.identity.file_bytes),
        Some(places.len() as u32)
    );
    // A file must have room for all full pieces.
    assert_eq!(count(0), None);
    let part = adopted.create().unwrap();
    let table = part.table();
    let found = table.all().map(|index| table.piece(index).unwrap());
    assert_eq!(
        found
            .map(|p| (p.offset, u64::from(p.len)))
            .collect::<Vec<_>>(),
        places
    );
    assert!(places.iter().any(|(_, len)| *len == u64::from(PIECE_BYTES)));
    assert_eq!(table.piece(table.len()), None);
    // Blocks and head together are all pieces, and share none.
    let mut all = [each(&table.of_layers(0, 3)), each(&table.of_head())].concat();
    all.sort_unstable();
    assert_eq!(all, each(&[table.all()]));
    let two = each(&table.of_layers(1, 2));
    for index in table.all() {
        let name = table.tensor_of(index).unwrap();
        let in_two = name.starts_with("blk.1.") || name.starts_with("blk.2.");
        assert_eq!(two.contains(&index), in_two, "{name}");
    }
    assert!(table.of_layers(4, 9).is_empty() && table.of_layers(2, 1).is_empty());
}

#[test]
fn an_adoption_decides_the_cache_of_its_parts() {
    let tiny = TinyLlama {
        head_dim: 32,
        ..large()
    };
    let plain = Adopted::of(tiny.file());
    let cached = Adopted::of(tiny.file().with_cache(CacheDtype::Q8_0).unwrap());
    assert_ne!(plain.identity.weights, cached.identity.weights);
    assert_eq!(plain.identity.head, cached.identity.head);
    for (adopted, cache) in [(&plain, CacheDtype::F16), (&cached, CacheDtype::Q8_0)] {
        let part = Arc::new(adopted.create().unwrap());
        adopted.fetch(&part, &[part.table().all()]);
        let model = part.model_file().unwrap();
        assert_eq!(model.spec().attention.cache, cache);
        let manifest = Manifest::of(&model, &mut |_, _| {});
        assert_eq!(manifest.weights_id(), adopted.identity.weights);
        let sound = manifest.verify(&model, 0..4, true, &mut |_, _| {});
        assert_eq!(sound, Ok(()));
        // A setting of this machine does not change it.
        let model = model.with_cache(CacheDtype::Q8_0).unwrap();
        assert_eq!(model.spec().attention.cache, cache);
    }
}

#[test]
fn a_part_fetched_by_several_threads_has_the_bytes_of_the_file() {
    let adopted = Adopted::of(large().file());
    let part = Arc::new(adopted.create().unwrap());
    let layers = part.table().of_layers(1, 2);
    let wanted = [layers.clone(), part.table().of_head()].concat();
    let mut order = each(&wanted);
    // A fixed shuffle: 7919 is a prime.
    order.sort_by_key(|index| index * 7919 % 101);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (part, order, adopted) = (&part, &order, &adopted);
            scope.spawn(move || {
                for (at, &index) in order.iter().enumerate().skip(thread % 2) {
                    part.write(index, adopted.bytes(part, index)).unwrap();
                    if at % 16 == 3 {
                        part.sync().unwrap();
                    }
                }
            });
        }
    });
    part.sync().unwrap();
    assert!(part.missing(&wanted).is_empty());
    assert_eq!(each(&part.held()).len(), order.len());
    for &index in &order {
        assert_eq!(
            part.read(index).unwrap().as_deref(),
            Some(adopted.bytes(&part, index))
        );
    }
    let model = part.model_file().unwrap();
    assert!(model.holds_head() && model.holds_layers(1, 2) && !model.holds_layers(0, 1));
    assert_eq!(model.held_layers(), [(1, 2)]);
    assert_eq!(adopted.model.held_layers(), [(0, 3)]);
    assert!(adopted.model.is_whole() && !model.is_whole());
    assert_eq!(
        model.manifest(&mut |_, _| panic!("hashed")),
        adopted.manifest
    );
    for info in model.layer_tensors(2).chain(model.head_tensors()) {
        let (here, whole) = (model.tensor(&info.name), adopted.model.tensor(&info.name));
        assert!(here.unwrap().bytes == whole.unwrap().bytes, "{}", info.name);
    }
    let verify = |layers, head| {
        adopted
            .manifest
            .verify(&model, layers, head, &mut |_, _| {})
    };
    assert_eq!(verify(1..3, true), Ok(()));
    assert_matches!(verify(0..3, false), Err(VerifyError::NotHeld(name)) if name.starts_with("blk.0."));
    assert_eq!(
        model.verify(None, &mut |_, _| {}),
        Ok(adopted.manifest.clone())
    );
}

#[test]
fn a_tensor_that_is_not_held_is_an_error_and_never_zeros() {
    let adopted = Adopted::of(large().file());
    let part = Arc::new(adopted.create().unwrap());
    adopted.fetch(&part, &part.table().of_head());
    let path = part.path();
    for model in [part.model_file().unwrap(), open_model(&path).unwrap()] {
        assert!(model.holds_head() && model.held_layers().is_empty());
        for info in model.gguf().tensors() {
            let found = model.tensor(&info.name);
            match info.name.starts_with("blk.") {
                true => assert_matches!(found, Err(ModelError::NotHeld(_))),
                false => assert!(found.unwrap().bytes.iter().any(|byte| *byte != 0)),
            }
        }
        assert_eq!(model.not_finite(&mut |_, _| {}), None);
    }
    // As a whole model the file would be read through its holes, also by a link.
    let link = adopted.parts.path().join("link.gguf");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for path in [&path, &link] {
        assert_matches!(ModelFile::open(path), Err(ModelError::Part(_)));
    }
}

#[test]
fn wrong_bytes_and_unknown_pieces_are_refused() {
    let adopted = Adopted::of(large().file());
    let part = adopted.create().unwrap();
    let good = adopted.bytes(&part, 0);
    let mut other = good.to_vec();
    other[5] ^= 1;
    for wrong in [&other[..], &good[1..], &[good, &[0]].concat(), &[]] {
        let error = part.write(0, wrong).unwrap_err();
        assert_matches!(&error, PartError::Mismatch(what) if what.starts_with("piece 0 of "));
        assert_eq!(error.code(), "mismatch");
    }
    let count = part.table().len();
    assert_matches!(part.write(count, good), Err(PartError::NoPiece { .. }));
    part.sync().unwrap();
    assert!(part.held().is_empty() && part.read(0).unwrap().is_none());
}

#[test]
fn only_synced_pieces_are_claimed_after_a_kill() {
    let adopted = Adopted::of(large().file());
    let part = adopted.create().unwrap();
    adopted.fetch(&part, &[2..5]);
    part.write(7, adopted.bytes(&part, 7)).unwrap();
    assert_eq!(part.held(), [2..5]);
    assert_eq!(part.missing(&[0..8]), [0..2, 5..7]);
    drop(part);
    let part = Part::open(&adopted.path()).unwrap();
    assert_eq!(part.held(), [2..5]);
    assert_eq!(part.missing(&[0..8]), [0..2, 5..8]);
    assert_eq!(part.identity(), &adopted.identity);
}

#[test]
fn damaged_or_missing_claims_are_made_again_from_the_pieces() {
    let adopted = Adopted::of(large().file());
    let part = adopted.create().unwrap();
    adopted.fetch(&part, &[2..5, 9..10]);
    let piece = part.table().piece(3).unwrap();
    drop(part);
    let held = adopted.path().join("held");
    let good = fs::read(&held).unwrap();
    let mut other = good.clone();
    other[22] ^= 0xff;
    for bytes in [Vec::new(), good[..good.len() - 1].to_vec(), other] {
        fs::write(&held, bytes).unwrap();
        assert_eq!(
            Part::open_reading(&adopted.path()).unwrap().held(),
            [2..5, 9..10]
        );
        assert_eq!(Part::open(&adopted.path()).unwrap().held(), [2..5, 9..10]);
        assert_eq!(fs::read(&held).unwrap(), good);
    }
    overwrite(&adopted, piece.offset);
    fs::remove_file(&held).unwrap();
    assert_eq!(
        Part::open(&adopted.path()).unwrap().held(),
        [2..3, 4..5, 9..10]
    );
}

/// Changes a byte of the part's file behind its back.
fn overwrite(adopted: &Adopted, offset: u64) {
    use std::os::unix::fs::FileExt as _;
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(adopted.path().join("model.gguf"));
    let (file, mut byte) = (file.unwrap(), [0]);
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}

#[test]
fn damage_on_the_disk_is_noticed_by_every_reader_and_fetched_again() {
    let adopted = Adopted::of(large().file());
    type Reader = fn(&Adopted, &Arc<Part>, u32);
    let readers: [Reader; 4] = [
        |_, part, index| assert_eq!(part.read(index).unwrap(), None),
        |_, part, index| {
            let name = part.table().tensor_of(index).unwrap();
            let model = part.model_file().unwrap();
            assert_matches!(model.tensor(name), Err(ModelError::Damaged(_)));
        },
        |adopted, part, index| {
            let name = part.table().tensor_of(index).unwrap().to_owned();
            let found =
                adopted
                    .manifest
                    .verify(&part.model_file().unwrap(), 0..4, true, &mut |_, _| {});
            assert_eq!(found, Err(VerifyError::Tensor(name)));
        },
        |_, part, index| {
            let error = part
                .model_file()
                .unwrap()
                .verify(None, &mut |_, _| {})
                .unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains(part.table().tensor_of(index).unwrap()),
                "{error}"
            );
        },
    ];
    let part = Arc::new(adopted.create().unwrap());
    for (index, reader) in (3..).zip(readers) {
        adopted.fetch(&part, &[part.table().all()]);
        overwrite(&adopted, part.table().piece(index).unwrap().offset);
        reader(&adopted, &part, index);
        assert_eq!(part.missing(&[part.table().all()]), [index..index + 1]);
        let beside = Part::open_reading(&adopted.path()).unwrap();
        assert_eq!(
            beside.held(),
            part.held(),
            "the claim is gone on the disk as well"
        );
    }
    // A command beside no daemon gives up the claim on the disk, too.
    adopted.fetch(&part, &[part.table().all()]);
    overwrite(&adopted, part.table().piece(1).unwrap().offset);
    let path = part.path();
    drop(part);
    open_model(&path)
        .unwrap()
        .verify(None, &mut |_, _| {})
        .unwrap_err();
    let part = Part::open(&adopted.path()).unwrap();
    assert_eq!(part.missing(&[part.table().all()]), [1..2]);
}

#[test]
fn damaged_objects_are_noticed_and_creating_again_repairs_them() {
    let adopted = Adopted::of(large().file());
    let part = adopted.create().unwrap();
    adopted.fetch(&part, &[2..5]);
    drop(part);
    for name in ["manifest", "pieces", "identity", "model.gguf"] {
        let path = adopted.path().join(name);
        if name == "model.gguf" {
            overwrite(&adopted, 40);
        } else {
            let mut bytes = fs::read(&path).unwrap();
            bytes[10] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
        let error = Part::open(&adopted.path()).unwrap_err();
        assert_eq!(error.code(), "damaged", "{name}: {error}");
        assert_eq!(adopted.create().unwrap().held(), [2..5], "{name}");
        if name != "model.gguf" {
            fs::remove_file(&path).unwrap();
            assert_matches!(Part::open(&adopted.path()), Err(PartError::Damaged { .. }));
            assert_eq!(adopted.create().unwrap().held(), [2..5], "{name}");
        }
    }
    fs::remove_dir_all(adopted.path()).unwrap();
    assert_matches!(Part::open(&adopted.path()), Err(PartError::Damaged { .. }));
}

/// A whole file on the disk, and the part that is made of it.
fn of_file(adopted: &Adopted, model: &ModelFile) -> Result<Part, PartError> {
    let (parts, manifest) = (adopted.parts.path(), adopted.manifest.encode());
    Part::of_file(parts, &adopted.identity, model, &manifest, &adopted.pieces)
}

#[test]
fn a_part_of_a_whole_file_shares_its_bytes_and_never_harms_it() {
    let adopted = Adopted::of(large().file());
    let path = whole_file(&adopted);
    let whole = ModelFile::open(&path).unwrap();
    let part = of_file(&adopted, &whole).unwrap();
    let all = [part.table().all()];
    assert_eq!(part.held(), all);
    let inode = |path: &PathBuf| fs::metadata(path).unwrap().ino();
    assert_eq!(inode(&part.path()), inode(&path));
    // The other name keeps its bytes when the part gives them up.
    part.evict(&all).unwrap();
    assert_eq!(part.held(), []);
    assert_eq!(fs::read(&path).unwrap(), adopted.file);
    drop(part);
    // A call that was interrupted left the second name without claims.
    fs::remove_file(adopted.path().join("held")).unwrap();
    let part = of_file(&adopted, &whole).unwrap();
    assert_eq!(part.held(), all);
    assert_eq!(fs::read(&path).unwrap(), adopted.file);
    drop(part);
    // The model may be the part itself, whose other name is gone.
    fs::remove_file(&path).unwrap();
    let own = open_model(&adopted.path().join("model.gguf")).unwrap();
    let part = of_file(&adopted, &own).unwrap();
    assert_eq!(part.held(), all);
    assert_eq!(fs::read(part.path()).unwrap(), adopted.file);
}

#[test]
fn a_file_is_hashed_once_however_often_it_is_adopted() {
    let dir = tempfile::tempdir().unwrap();
    let file = ModelFile::open(&large().write(dir.path())).unwrap();
    let manifest = file.manifest(&mut |_, _| {});
    fn unread(_: u64, _: u64) {
        panic!("it is hashed again");
    }
    let (identity, list) = identity_of(&file, &manifest, &mut |_, _| {}).unwrap();
    let encoded = manifest.encode();
    let part = Part::of_linked_file(dir.path(), &identity, &file, &encoded, &list).unwrap();
    assert_eq!(part.held(), [part.table().all()]);
    // The second name changes the time of the inode, and no content.
    assert_eq!(file.manifest(&mut unread), manifest);
    let again = identity_of(&file, &manifest, &mut unread).unwrap();
    assert_eq!(again, (identity, list.clone()));
    let stored = pieces_path(file.path().unwrap());
    let mut bytes = fs::read(&stored).unwrap();
    bytes[40] ^= 1;
    fs::write(&stored, bytes).unwrap();
    let mut is_hashed = false;
    let (_, found) = identity_of(&file, &manifest, &mut |_, _| is_hashed = true).unwrap();
    assert!(is_hashed && found == list);
}

#[test]
fn a_users_own_file_is_never_written() {
    let adopted = Adopted::of(large().file());
    let path = whole_file(&adopted);
    let whole = ModelFile::open(&path).unwrap();
    let manifest = adopted.manifest.encode();
    let linked = |model: &ModelFile| {
        let parts = adopted.parts.path();
        Part::of_linked_file(parts, &adopted.identity, model, &manifest, &adopted.pieces)
    };
    let part = linked(&whole).unwrap();
    assert!(part.is_shared() && !whole.is_replaced());
    let piece = part.table().piece(3).unwrap();
    overwrite(&adopted, piece.offset);
    let changed = fs::read(&path).unwrap();
    assert_eq!(part.read(3).unwrap(), None);
    let error = part.write(3, adopted.bytes(&part, 3)).unwrap_err();
    assert_matches!(error, PartError::Shared(_));
    let held = part.held();
    drop(part);
    // A file without a second name leaves the part as it is.
    assert_matches!(linked(&adopted.model), Err(PartError::File(_)));
    assert_eq!(Part::open(&adopted.path()).unwrap().held(), held);
    assert_eq!(stored_identity(&adopted.path()).unwrap(), adopted.identity);
    // The part of another head gets a file of its own.
    let second = with_another_head(adopted.parts);
    let part = second.create().unwrap();
    assert!(!part.is_shared() && part.held().is_empty());
    second.fetch(&part, &[0..4]);
    assert_eq!(fs::read(&path).unwrap(), changed);
}

#[test]
fn a_file_that_a_symbolic_link_leads_to_is_never_changed() {
    let adopted = Adopted::of(large().file());
    let own = tempfile::tempdir().unwrap();
    let (path, link) = (own.path().join("whole.gguf"), own.path().join("link.gguf"));
    fs::write(&path, &adopted.file).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let part = of_file(&adopted, &ModelFile::open(&link).unwrap()).unwrap();
    let all = [part.table().all()];
    assert_eq!(part.held(), all);
    assert!(part.is_shared());
    part.evict(&all).unwrap();
    assert_eq!(fs::read(&path).unwrap(), adopted.file);
    drop(part);
    // Nor if the part's own file is replaced by a link.
    let inside = adopted.path().join("model.gguf");
    fs::remove_file(&inside).unwrap();
    std::os::unix::fs::symlink(&path, &inside).unwrap();
    assert_matches!(Part::open(&adopted.path()), Err(PartError::Damaged { .. }));
    let part = adopted.create().unwrap();
    adopted.fetch(&part, &all);
    part.evict(&all).unwrap();
    assert!(!inside.is_symlink());
    assert_eq!(fs::read(&path).unwrap(), adopted.file);
}

#[test]
fn a_removed_part_claims_nothing_of_the_one_that_follows_it() {
    let adopted = Adopted::of(large().file());
    let removed = adopted.create().unwrap();
    removed.write(0, adopted.bytes(&removed, 0)).unwrap();
    assert!(removed.leave("home").unwrap());
    let part = adopted.create().unwrap();
    removed.sync().unwrap_err();
    drop(part);
    assert!(Part::open(&adopted.path()).unwrap().held().is_empty());
}

#[test]
fn files_that_were_removed_from_an_open_part_are_made_again() {
    let adopted = Adopted::of(large().file());
    let part = adopted.create().unwrap();
    let layer = part.table().of_layers(1, 1);
    adopted.fetch(&part, &layer);
    assert!(!part.restore().unwrap());
    // The pieces stay where they are.
    fs::remove_file(adopted.path().join("manifest")).unwrap();
    assert!(part.restore().unwrap());
    assert!(part.missing(&layer).is_empty());
    let cut = |path: PathBuf| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_len(adopted.identity.file_bytes - 1).unwrap();
    };
    let removals: [&dyn Fn(PathBuf); 3] = [
        &|folder: PathBuf| cut(folder.join("model.gguf")),
        &|folder: PathBuf| fs::remove_file(folder.join("model.gguf")).unwrap(),
        &|folder: PathBuf| fs::remove_dir_all(folder).unwrap(),
    ];
    for remove in removals {
        remove(adopted.path());
        assert!(part.restore().unwrap());
        assert_eq!(part.missing(&layer), layer);
        adopted.fetch(&part, &layer);
        let stored = Part::open_reading(&adopted.path()).unwrap();
        assert!(stored.missing(&layer).is_empty());
        // It is still the only writer.
        assert_matches!(Part::open(&adopted.path()), Err(PartError::InUse(_)));
    }
    overwrite(&adopted, 0);
    assert_matches!(part.restore(), Err(PartError::Damaged { .. }));
}

#[test]
fn a_part_has_one_writer() {
    let adopted = Adopted::of(large().file());
    let part = adopted.create().unwrap();
    assert_matches!(Part::open(&adopted.path()), Err(PartError::InUse(_)));
    assert_matches!(adopted.create(), Err(PartError::InUse(_)));
    let beside = Part::open_reading(&adopted.path()).unwrap();
    let bytes = adopted.bytes(&part, 0);
    assert_matches!(beside.write(0, bytes), Err(PartError::ReadOnly));
    beside.evict(&[0..1]).unwrap_err();
    drop(part);
    Part::open(&adopted.path()).unwrap();
}

#[test]
fn evicted_pieces_return_their_blocks_and_are_holes() {
    let adopted = Adopted::of(large().file());
    let part = Arc::new(adopted.create().unwrap());
    adopted.fetch(&part, &[part.table().all()]);
    let blocks = || {
        fs::File::open(part.path()).unwrap().sync_all().unwrap();
        fs::metadata(part.path()).unwrap().blocks() * 512
    };
    let (before, disk) = (blocks(), part.disk_bytes());
    assert!(disk > before);
    let model = part.model_file().unwrap();
    let evicted = part.table().of_layers(1, 1);
    part.evict(&evicted).unwrap();
    // Up to a block at each end of a tensor stays.
    let freed = part.table().bytes(&evicted) - 9 * 2 * 4096;
    assert!(before - blocks() >= freed, "{before} {}", blocks());
    assert!(part.disk_bytes() <= disk - freed);
    assert_eq!(part.missing(&[part.table().all()]), evicted);
    assert_eq!(
        Part::open_reading(&adopted.path()).unwrap().held(),
        part.held()
    );
    assert_matches!(
        model.tensor("blk.1.attn_q.weight"),
        Err(ModelError::NotHeld(_))
    );
    assert_eq!(model.held_layers(), [(0, 0), (2, 3)]);
    adopted.fetch(&part, &evicted);
    assert_eq!(
        model.verify(None, &mut |_, _| {}),
        Ok(adopted.manifest.clone())
    );
}

#[test]
fn a_copy_of_a_tensor_whose_pieces_are_given_up_meanwhile_is_refused() {
    let adopted = Adopted::of(large().file());
    let part = Arc::new(adopted.create().unwrap());
    adopted.fetch(&part, &[part.table().all()]);
    // The second one was opened as by another process.
    let models = [
        part.model_file().unwrap(),
        open_model(&part.path()).unwrap(),
    ];
    let copied = |layer| {
        let checked = models.each_ref().map(|model: &ModelFile| {
            let tensors = model.layer_tensors(layer);
            match model.check_copied(tensors) {
                Err(ModelError::NotHeld(name)) => name.starts_with(&format!("blk.{layer}.")),
                checked => checked.map(|()| false).unwrap(),
            }
        });
        assert_eq!(checked[0], checked[1]);
        checked[0]
    };
    assert!(!copied(1));
    part.evict(&part.table().of_layers(1, 1)).unwrap();
    assert!(copied(1) && !copied(2));
}

#[test]
fn objects_that_are_read_from_a_file_are_those_of_the_mapped_one() {
    let adopted = Adopted::of(large().file());
    let path = whole_file(&adopted);
    let file = open_joined_at(&path, 0).unwrap();
    let read = || objects_of(&*file, adopted.head().to_vec());
    let (manifest, list) = read().unwrap();
    assert!(manifest == adopted.manifest.encode() && list == adopted.pieces);
    let cut = fs::File::options().write(true).open(&path).unwrap();
    cut.set_len(adopted.identity.file_bytes - 1).unwrap();
    read().unwrap_err();
}

#[test]
fn a_second_adoption_with_another_head_keeps_the_weights() {
    let first = Adopted::of(large().file());
    let part = first.create().unwrap();
    first.fetch(&part, &[part.table().all()]);
    drop(part);
    let second = with_another_head(first.parts);
    let part = second.create().unwrap();
    assert_eq!(part.held(), [part.table().all()]);
    assert_eq!(part.identity(), &second.identity);
    assert_eq!(part.head(0, u32::MAX).unwrap(), second.head());
    assert_eq!(part.head(7, 3).unwrap(), second.head()[7..10]);
    assert!(part.head(MAX_HEAD_BYTES, 3).unwrap().is_empty());
}

#[test]
fn objects_that_differ_from_the_adoption_or_contradict_each_other_are_named() {
    let adopted = Adopted::of(large().file());
    let (head, manifest) = (adopted.head().to_vec(), adopted.manifest.encode());
    let list = &adopted.pieces;
    let parts = adopted.parts.path();
    let create = |identity: &Identity, head: &[u8], manifest: &[u8], list: &[u8]| {
        Part::create(parts, identity, head, manifest, list).unwrap_err()
    };
    for (error, what) in rows! {
        create(&adopted.identity, &head[1..], &manifest, list) => "the head";
        create(&adopted.identity, &head, &manifest[1..], list) => "the manifest";
        create(&adopted.identity, &head, &manifest, &list[32..]) => "the piece list";
    } {
        assert_matches!(&error, PartError::Mismatch(found) if found == what, "{what}");
    }
    let with_list = |list: &[u8]| Identity {
        pieces: Digest::of(list),
        ..adopted.identity
    };
    let with_manifest = |tiny: &TinyLlama| {
        let bytes = Manifest::of(&tiny.file(), &mut |_, _| {}).encode();
        let identity = Identity {
            weights: WeightsId::of(&bytes),
            manifest_bytes: bytes.len() as u64,
            ..adopted.identity
        };
        (identity, bytes)
    };
    let (taller, taller_bytes) = with_manifest(&TinyLlama {
        layers: 5,
        ..large()
    });
    let (wider, wider_bytes) = with_manifest(&TinyLlama {
        weights: "q4_1",
        ..large()
    });
    let padded = [&head[..], &[0; 32]].concat();
    let longer = Identity {
        head: Digest::of(&padded),
        head_bytes: padded.len() as u64,
        ..adopted.identity
    };
    let huge = Identity {
        head_bytes: MAX_HEAD_BYTES + 1,
        ..adopted.identity
    };
    for (error, what) in rows! {
        create(&taller, &head, &taller_bytes, list)
            => "the manifest has 5 as layers, the file's head 4";
        create(&wider, &head, &wider_bytes, list) => "as Q4_1, the file's head as Q8_0";
        create(&with_list(&list[32..]), &head, &manifest, &list[32..]) => "its piece list has";
        create(&longer, &padded, &manifest, list) => "the first tensor begins at";
        create(&huge, &head, &manifest, list) => "its head has";
    } {
        assert_matches!(&error, PartError::Disagrees(_));
        assert!(error.to_string().contains(what), "{error}");
    }
    // A file that is too short for its tensors, or longer.
    for file_bytes in [
        adopted.identity.file_bytes - 32,
        adopted.identity.file_bytes + 64,
    ] {
        let other = Identity {
            file_bytes,
            ..adopted.identity
        };
        assert_matches!(create(&other, &head, &manifest, list), PartError::Model(_));
    }
    assert_eq!(
        fs::read_dir(parts).unwrap().count(),
        0,
        "nothing was written"
    );
}
