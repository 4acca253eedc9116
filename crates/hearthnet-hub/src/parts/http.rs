//! Byte ranges of a model file over HTTP.

use std::io::Read as _;

use hearthnet_files::part::Piece;

use super::source::{
    Object, PieceSource, Rank, SourceError, WHOLE_FILE_RUN, all_pieces, read_head, read_run,
};
use crate::pull::http::{Response, agent, header, parse_range, refused, request, unreachable};
use crate::pull::{PullOptions, SourceError as HttpError};
use crate::source::Source;

/// Bytes that are asked for with the length of a file: most headers of safetensors are shorter.
const BEGIN_BYTES: u64 = 16 << 10;

/// Model file on the hub, or at an address.
pub struct HubSource {
    name: String,
    file: Ranges,
}

impl HubSource {
    /// [`Self::new`] for a source that other members named.
    ///
    /// # Errors
    /// [`SourceError::Unusable`] also if it is not public ([`Source::is_public`]).
    pub fn adopted(
        source: &Source,
        options: &PullOptions,
        file_bytes: u64,
    ) -> Result<Self, SourceError> {
        check_public(source)?;
        Self::new(source, options, file_bytes)
    }

    /// `file_bytes` is the length of the adopted file.
    ///
    /// # Errors
    /// [`SourceError::Unusable`] if the source has no address: a wheel and a file of this machine.
    pub fn new(
        source: &Source,
        options: &PullOptions,
        file_bytes: u64,
    ) -> Result<Self, SourceError> {
        let Some(url) = source.address(&options.hub) else {
            let why = format!("{source} has no byte ranges over HTTP; pull the whole file");
            return Err(SourceError::Unusable(why));
        };
        Ok(Self {
            name: source.to_string(),
            file: Ranges {
                agent: agent(options, &url, 10),
                url,
                options: options.clone(),
                file_bytes,
            },
        })
    }
}

/// Refuses a source that other members named, if it is not public.
pub(super) fn check_public(source: &Source) -> Result<(), SourceError> {
    match source.is_public() {
        true => Ok(()),
        false => Err(SourceError::Unusable(format!(
            "the source {source} is not used: it is not a public https address"
        ))),
    }
}

/// File that a server sends in byte ranges.
pub(super) struct Ranges {
    url: String,
    agent: ureq::Agent,
    options: PullOptions,
    pub(super) file_bytes: u64,
}

impl Ranges {
    /// Finds a file of unknown length; `None` if there is none. Returns its first bytes, too; all of
    /// them if the server sends it whole, and it has at most `whole` bytes.
    pub(super) fn find(
        url: String,
        options: &PullOptions,
        whole: u64,
    ) -> Result<Option<(Self, Vec<u8>)>, SourceError> {
        let agent = agent(options, &url, 10);
        let response = request(&agent, options, &url)
            .header("Range", format!("bytes=0-{}", BEGIN_BYTES - 1))
            .call()
            .map_err(|error| unreachable(&url, &error))?;
        let (file_bytes, begin) = match response.status().as_u16() {
            404 => return Ok(None),
            206 => {
                let range = header(&response, "content-range").unwrap_or_default();
                let wrong = || answer(&format!("it sends range {range:?}"));
                let Some((positions, Some(total))) = parse_range(range) else {
                    return Err(wrong());
                };
                let len = total.min(BEGIN_BYTES);
                if positions != (0..=len.saturating_sub(1)) {
                    return Err(wrong());
                }
                (total, body(response, len)?)
            }
            200 => {
                let len = header(&response, "content-length");
                match len.and_then(|len| len.parse::<u64>().ok()) {
                    Some(len) if len <= whole => (len, body(response, len)?),
                    _ => return Err(SourceError::NoRanges),
                }
            }
            _ => return Err(refused(&response).into()),
        };
        let file = Self {
            url,
            agent,
            options: options.clone(),
            file_bytes,
        };
        Ok(Some((file, begin)))
    }

    pub(super) fn range(&self, from: u64, len: u64) -> Result<Vec<u8>, SourceError> {
        let last = from.saturating_add(len).saturating_sub(1);
        let request = request(&self.agent, &self.options, &self.url);
        let response = request
            .header("Range", format!("bytes={from}-{last}"))
            .call()
            .map_err(|error| unreachable(&self.url, &error))?;
        self.check(&response, from, last)?;
        body(response, len)
    }

    /// Checks status, range and length of an answer.
    fn check(&self, response: &Response, from: u64, last: u64) -> Result<(), SourceError> {
        let other_length = |found| {
            let expected = self.file_bytes;
            Err(HttpError::Length { expected, found }.into())
        };
        let range = header(response, "content-range").unwrap_or_default();
        match response.status().as_u16() {
            206 => {}
            200 => return Err(SourceError::NoRanges),
            // `bytes */TOTAL`
            416 => match range
                .rsplit('/')
                .next()
                .and_then(|total| total.parse().ok())
            {
                Some(found) if found != self.file_bytes => return other_length(found),
                _ => return Err(refused(response).into()),
            },
            _ => return Err(refused(response).into()),
        }
        let wrong = || answer(&format!("it sends range {range:?}"));
        let (positions, total) = parse_range(range).ok_or_else(wrong)?;
        if let Some(found) = total.filter(|total| *total != self.file_bytes) {
            return other_length(found);
        }
        let len = header(response, "content-length").and_then(|len| len.parse::<u64>().ok());
        if positions != (from..=last) || len.is_some_and(|len| len != last - from + 1) {
            return Err(wrong());
        }
        Ok(())
    }
}

/// Body of an answer, which must have this length.
fn body(response: Response, len: u64) -> Result<Vec<u8>, SourceError> {
    let mut bytes = Vec::new();
    let reader = response.into_body().into_reader();
    let read = reader.take(len.saturating_add(1)).read_to_end(&mut bytes);
    let done = bytes.len() as u64;
    let reason = match read {
        Ok(_) if done == len => return Ok(bytes),
        Ok(_) if done > len => return Err(answer("it sends more than the range")),
        Ok(_) => "the answer ended".to_owned(),
        Err(error) => error.to_string(),
    };
    let total = len;
    let error = HttpError::Interrupted {
        done,
        total,
        reason,
    };
    Err(error.into())
}

fn answer(problem: &str) -> SourceError {
    HttpError::Answer(problem.to_owned()).into()
}

impl PieceSource for HubSource {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn rank(&self) -> Rank {
        Rank::Hub
    }

    fn pieces(&self) -> Result<Vec<std::ops::Range<u32>>, SourceError> {
        Ok(all_pieces())
    }

    fn run(&self) -> u32 {
        WHOLE_FILE_RUN
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        read_run(run, |from, len| self.file.range(from, len))
    }

    fn object(
        &self,
        object: Object,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>, SourceError> {
        read_head(object, len, |len| self.file.range(offset, len))
    }
}
