//! Head, manifest and piece list of a model that this node has nothing of.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hearthnet_files::manifest::{Digest, Manifest};
use hearthnet_files::part::{Identity, Part, PartError, piece_count};

use super::error::{Dropped, FetchError, Why};
use super::fetch::Progress;
use super::source::{Object, PieceSource, Rank, SourceError};

/// Time for an object of a source, beyond that of its bytes at the least rate in bytes per second.
/// Sources are asked one after the other, so one that sends little by little would delay all others.
const LONGEST: Duration = Duration::from_secs(60);
const LEAST_RATE: u64 = 32 << 10;

/// Opens the part of an adopted model. If it does not exist, it is created from head, manifest and
/// piece list of the first sources that have them. Each is verified before it is used.
///
/// # Errors
/// [`FetchError::NoObject`] if no source has one of them; [`FetchError::Part`] if the adoption
/// contradicts itself, or the part cannot be stored.
pub fn first_contact(
    parts: &Path,
    identity: &Identity,
    sources: &[Arc<dyn PieceSource>],
    news: &(dyn Fn(Progress<'_>) + Sync),
    stop: &AtomicBool,
) -> Result<Part, FetchError> {
    match Part::open(&Part::folder_in(parts, &identity.weights)) {
        Ok(part) if part.identity() == identity => return Ok(part),
        Err(error @ PartError::InUse(_)) => return Err(error.into()),
        // `create` replaces the objects of another or a damaged part.
        _ => {}
    }
    identity.check_lengths()?;
    let mut sources = sources.to_vec();
    // A whole file has no manifest before all of it was hashed, so neighbours are asked first.
    sources.sort_by_key(|source| match source.rank() {
        Rank::Neighbour => 0,
        Rank::Local => 1,
        Rank::Hub => 2,
    });
    let mut get = |object, bytes, digest| {
        let wanted = Wanted {
            object,
            bytes,
            digest,
        };
        wanted.ask_all(&mut sources, news, stop)
    };
    let digest = Digest(identity.weights.0);
    let manifest = get(Object::Manifest, identity.manifest_bytes, digest)?;
    let decoded = Manifest::decode(&manifest).map_err(PartError::from)?;
    // The piece list is kept in memory until its digest can be checked.
    let count = piece_count(&decoded, identity.file_bytes).ok_or_else(|| {
        PartError::Disagrees("its manifest has more pieces than its file can have".to_owned())
    })?;
    let pieces = get(Object::PieceList, u64::from(count) * 32, identity.pieces)?;
    let head = get(Object::Head, identity.head_bytes, identity.head)?;
    Ok(Part::create(parts, identity, &head, &manifest, &pieces)?)
}

struct Wanted {
    object: Object,
    bytes: u64,
    digest: Digest,
}

impl Wanted {
    /// Asks one source after the other. A source with another object is removed.
    fn ask_all(
        &self,
        sources: &mut Vec<Arc<dyn PieceSource>>,
        news: &(dyn Fn(Progress<'_>) + Sync),
        stop: &AtomicBool,
    ) -> Result<Vec<u8>, FetchError> {
        let mut asked = Vec::new();
        let mut at = 0;
        while let Some(source) = sources.get(at).map(Arc::clone) {
            let why = match self.ask_one(&*source, stop)? {
                Ok(Some(bytes)) if Digest::of(&bytes) == self.digest => return Ok(bytes),
                Ok(Some(_)) => {
                    sources.remove(at);
                    Why::Mismatch(format!("the {}", self.object))
                }
                Ok(None) => {
                    at += 1;
                    asked.push(format!("{} does not have it", source.name()));
                    continue;
                }
                Err(error) => {
                    at += 1;
                    Why::Failed(error)
                }
            };
            let dropped = Dropped {
                source: source.name(),
                rank: source.rank(),
                why,
            };
            if dropped.is_liar() {
                news(Progress::Dropped(&dropped));
            }
            asked.push(dropped.to_string());
        }
        let object = self.object;
        Err(FetchError::NoObject { object, asked })
    }

    fn ask_one(
        &self,
        source: &dyn PieceSource,
        stop: &AtomicBool,
    ) -> Result<Result<Option<Vec<u8>>, SourceError>, FetchError> {
        let most = LONGEST.saturating_add(Duration::from_secs(self.bytes / LEAST_RATE));
        let (mut bytes, begin) = (Vec::new(), Instant::now());
        loop {
            let done = bytes.len() as u64;
            let left = self.bytes.saturating_sub(done);
            if left == 0 {
                return Ok(Ok(Some(bytes)));
            }
            if stop.load(Ordering::Relaxed) {
                return Err(FetchError::Stopped);
            }
            if begin.elapsed() > most {
                return Ok(Err(SourceError::Silent(most)));
            }
            let len = u32::try_from(left).unwrap_or(u32::MAX);
            match source.object(self.object, done, len) {
                Ok(Some(more)) if more.is_empty() || more.len() as u64 > left => {
                    let why = format!("its {} has another length", self.object);
                    return Ok(Err(SourceError::Unusable(why)));
                }
                Ok(Some(more)) => bytes.extend(more),
                Ok(None) => return Ok(Ok(None)),
                Err(error) => return Ok(Err(error)),
            }
        }
    }
}
