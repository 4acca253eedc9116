//! Byte ranges of a model file over HTTP.

use std::io::Read as _;

use hearthnet_files::part::Piece;

use super::source::{
    MAX_OBJECT_READ, Object, PieceSource, Rank, SourceError, WHOLE_FILE_RUN, all_pieces, read_run,
};
use crate::pull::http::{Response, agent, header, parse_range, refused, request, unreachable};
use crate::pull::{PullOptions, SourceError as HttpError};
use crate::source::Source;

/// Model file on the hub, or at an address.
pub struct HubSource {
    name: String,
    url: String,
    agent: ureq::Agent,
    options: PullOptions,
    file_bytes: u64,
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
        if source.is_public() {
            return Self::new(source, options, file_bytes);
        }
        Err(SourceError::Unusable(format!(
            "the source {source} is not used: it is not a public https address"
        )))
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
            agent: agent(options, &url, 10),
            url,
            options: options.clone(),
            file_bytes,
        })
    }

    fn range(&self, from: u64, len: u64) -> Result<Vec<u8>, SourceError> {
        let last = from.saturating_add(len).saturating_sub(1);
        let request = request(&self.agent, &self.options, &self.url);
        let response = request
            .header("Range", format!("bytes={from}-{last}"))
            .call()
            .map_err(|error| unreachable(&self.url, &error))?;
        self.check(&response, from, last)?;
        let mut bytes = Vec::new();
        let mut body = response
            .into_body()
            .into_reader()
            .take(len.saturating_add(1));
        let read = body.read_to_end(&mut bytes);
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

    fn lanes(&self) -> usize {
        4
    }

    fn run(&self) -> u32 {
        WHOLE_FILE_RUN
    }

    fn read(&self, run: &[Piece]) -> Result<Option<Vec<u8>>, SourceError> {
        read_run(run, |from, len| self.range(from, len))
    }

    fn object(
        &self,
        object: Object,
        offset: u64,
        len: u32,
    ) -> Result<Option<Vec<u8>>, SourceError> {
        match object {
            Object::Head if len > 0 => self
                .range(offset, u64::from(len.min(MAX_OBJECT_READ)))
                .map(Some),
            _ => Ok(None),
        }
    }
}
