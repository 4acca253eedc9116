//! Forms, as data.

/// Form of a call's arguments.
#[derive(Debug)]
pub(in crate::tools) enum Arguments {
    /// A JSON object.
    Json,
    /// Names and values between marks.
    Listed(Listed),
    /// An object in the notation of Gemma 4: names without quotes, texts between [`QUOTE`]s, no
    /// escapes.
    Gemma,
}

/// Arguments between marks. White space before a name or the end is skipped.
///
/// ```text
/// name NAME value ... behind  between  name NAME value ... behind  end
/// ```
#[derive(Debug)]
pub(in crate::tools) struct Listed {
    /// Text before a name.
    pub(in crate::tools) name: &'static str,
    /// Texts between a name and its value. Between two may be white space.
    pub(in crate::tools) value: &'static [&'static str],
    /// Text behind a value.
    pub(in crate::tools) behind: &'static str,
    /// Text between two arguments.
    pub(in crate::tools) between: &'static str,
    /// Text behind the last argument.
    pub(in crate::tools) end: &'static str,
    /// True if a text has neither quotes nor escapes. Otherwise a value is JSON, and a text may
    /// also stand in single quotes, as in Python.
    pub(in crate::tools) raw: bool,
}

/// Begins and ends a text of Gemma 4.
pub(super) const QUOTE: &str = "<|\"|>";

/// Progress of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tools) enum Read {
    /// Some text was processed.
    On,
    /// More text is needed.
    More,
    /// The arguments are complete.
    Done,
    /// The text is none of the form. Only in a turn without its grammar.
    Broken,
}
