//! Complete part of a whole model file that is on this machine.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use hearthnet_platform::files::names;
use hearthnet_platform::whole_file::{self, Access};

use super::error::PartError;
use super::identity::Identity;
use super::objects::{HELD, remove};
use super::opening::lock_folder;
use super::store::Part;
use crate::error::FileError;
use crate::manifest::keep_record;
use crate::model_file::{ModelFile, PART_FILE, part_folder};

/// Second name of the model file until it replaces the part's file.
const LINK: &str = ".model.gguf.link";

impl Part {
    /// Opens the complete part of a whole model file: a second name of the file if both are on one
    /// file system, else a copy. The files of a split model are joined into a copy. `identity` and `pieces` are those of the file.
    ///
    /// # Errors
    /// As [`Self::create`], and [`PartError::File`] if the disk is full.
    pub fn of_file(
        parts: &Path,
        identity: &Identity,
        model: &ModelFile,
        manifest: &[u8],
        pieces: &[u8],
    ) -> Result<Self, PartError> {
        whole(parts, identity, model, (manifest, pieces), true)
    }

    /// As [`Self::of_file`], but never copies.
    ///
    /// # Errors
    /// As [`Self::of_file`], and [`PartError::File`] if the file cannot have a second name in the
    /// folder of parts. A part that exists then stays as it is.
    pub fn of_linked_file(
        parts: &Path,
        identity: &Identity,
        model: &ModelFile,
        manifest: &[u8],
        pieces: &[u8],
    ) -> Result<Self, PartError> {
        whole(parts, identity, model, (manifest, pieces), false)
    }
}

fn whole(
    parts: &Path,
    identity: &Identity,
    model: &ModelFile,
    (manifest, pieces): (&[u8], &[u8]),
    may_copy: bool,
) -> Result<Part, PartError> {
    let folder = Part::folder_in(parts, &identity.weights);
    let failed = |source| FileError::new("write", &folder, source);
    whole_file::make_folder(&folder, Access::Umask).map_err(failed)?;
    // Not the path of a symbolic link: a hard link to it would be another symbolic link, and the part
    // would change the file that it leads to.
    let source = model.path().unwrap_or(Path::new(""));
    // Its files cannot have one name together.
    let is_split = model.gguf().is_split();
    if is_split && !may_copy {
        return Err(PartError::Split(source.to_owned()));
    }
    let source = source
        .canonicalize()
        .map_err(|error| FileError::new("link", source, error))?;
    // The model may be this part itself.
    if part_folder(&source).is_some_and(|part| folder.canonicalize().is_ok_and(|f| f == part)) {
        return Part::open(&folder);
    }
    let lock = lock_folder(&folder)?;
    let (target, link) = (folder.join(PART_FILE), folder.join(LINK));
    remove(&folder, &[LINK]).map_err(failed)?;
    let place = || {
        let link_file = || {
            fs::hard_link(&source, &link)?;
            match names(&fs::metadata(&link)?) {
                // Some network file systems do not count names: the part would take the user's file for its own.
                0 | 1 => fs::remove_file(&link).and(Err(io::ErrorKind::Unsupported.into())),
                _ => Ok(()),
            }
        };
        let linked = match is_split {
            true => Err(io::ErrorKind::Unsupported.into()),
            false => link_file(),
        };
        if let (Err(error), false) = (&linked, may_copy) {
            let error = io::Error::new(error.kind(), error.to_string());
            return Err(FileError::new("link", &source, error));
        }
        // Without claims first, so that an interrupted call leaves none for another file. The file
        // itself may be another name of `source`, which a copy onto it would empty.
        remove(&folder, &[HELD, PART_FILE]).map_err(failed)?;
        match linked {
            Ok(()) => fs::rename(&link, &target).map_err(failed)?,
            Err(_) if is_split => join(model, &target).map_err(failed)?,
            Err(_) => drop(fs::copy(&source, &target).map_err(failed)?),
        }
        Ok(linked.is_ok())
    };
    let is_linked = keep_record(model.path().unwrap_or(&source), place)?;
    drop(lock);
    let objects = (model.gguf().head(), manifest, pieces);
    // `pieces` was made of this very file, which does not have to be hashed again.
    let holds_all = is_linked && !model.is_replaced();
    Part::make(parts, identity, objects, holds_all)
}

/// Writes the files of a split model as one.
fn join(model: &ModelFile, target: &Path) -> io::Result<()> {
    let mut out = BufWriter::new(File::create(target)?);
    model.gguf().write_joined(&mut out)?;
    out.flush()
}
