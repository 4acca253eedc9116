//! The hashes of a model file are cached beside it, so that gigabytes are hashed only once. An
//! attacker that can write there, or that hands over a folder, could pass off any weights as
//! genuine: with a record that holds the genuine manifest and the timestamps of the false file.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::UNIX_EPOCH;

use ciborium::Value;
use hearthnet_files::manifest::{FileState, file_state, record_path};
use hearthnet_files::{ModelFile, WeightsId};

use super::prelude::*;

/// Bytes of the proof in front of a record.
const PROOF: usize = 32;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = TinyLlama::default().write(folder.path());
    let genuine = weights(&path)?;
    let record = std::fs::read(record_path(&path))?;
    let (proof, record) = record
        .split_at_checked(PROOF)
        .ok_or_else(|| HarnessError::attacker("there is no record"))?;

    // Other weights of the same shape, with an identical header.
    let other = TinyLlama {
        seed: 4711,
        ..TinyLlama::default()
    };
    std::fs::write(&path, other.bytes())?;
    let forged = stamped(record, &path)?;
    for (what, proof) in [
        ("without a proof", &[][..]),
        ("with the proof of another record", proof),
        ("with a proof under another key", &[7; PROOF]),
    ] {
        std::fs::write(record_path(&path), [proof, &forged].concat())?;
        let state = file_state(&path);
        let held = !matches!(state, FileState::Verified(_));
        let claim = format!("a record {what}");
        found.check(claim, "ignored", format!("{state:?}"), held);
        let known = weights(&path)?;
        let seen = if known == genuine {
            "genuine"
        } else {
            "others"
        };
        let what = format!("weights identity with a record {what}");
        found.same(what, "others", seen);
    }
    Ok(())
}

fn weights(path: &Path) -> Result<WeightsId> {
    let model = ModelFile::open(path)?;
    Ok(model.manifest(&mut |_, _| {}).weights_id())
}

/// The record with the current size, timestamps and inode of the file.
fn stamped(record: &[u8], path: &Path) -> Result<Vec<u8>> {
    let mut value: Value = ciborium::from_reader(record)?;
    let field = |map: &mut Value, name: &str| -> Option<usize> {
        let map = map.as_map()?;
        map.iter().position(|(key, _)| key.as_text() == Some(name))
    };
    let info = std::fs::metadata(path)?;
    let modified = info.modified()?.duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let changed = info.ctime() as u64 * 1_000_000_000 + info.ctime_nsec() as u64;
    let now = [
        ("bytes", info.len().into()),
        ("modified_ns", modified.into()),
        ("changed_ns", changed.into()),
        ("inode", info.ino().into()),
    ];
    let forge = |value: &mut Value| -> Option<()> {
        let at = field(value, "stamp")?;
        let stamp = &mut value.as_map_mut()?.get_mut(at)?.1;
        for (name, number) in now {
            let at = field(stamp, name)?;
            stamp.as_map_mut()?.get_mut(at)?.1 = number;
        }
        Some(())
    };
    forge(&mut value).ok_or_else(|| HarnessError::attacker("the record has another form"))?;
    let mut bytes = Vec::new();
    ciborium::into_writer(&value, &mut bytes)?;
    Ok(bytes)
}
