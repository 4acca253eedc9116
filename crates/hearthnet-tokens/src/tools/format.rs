//! Families, by the texts with which they mark reasoning and calls.

/// How a family writes calls. Between two texts of a list may be white space.
///
/// ```text
/// mark open NAME arguments {...} close  next NAME arguments {...} close  end
/// ```
#[derive(Debug)]
pub(super) struct CallFormat {
    /// Texts that a template of the family has, all of them.
    known_by: &'static [&'static str],
    /// Begins the first call.
    pub(super) mark: &'static str,
    /// True if the mark begins a call only at the beginning of the text.
    pub(super) first_only: bool,
    /// Texts between the mark and the name.
    pub(super) open: &'static [&'static str],
    /// Text between the name and the arguments, a JSON object.
    pub(super) arguments: &'static str,
    /// Texts behind the arguments.
    pub(super) close: &'static [&'static str],
    /// Texts between a call and the name of the next one. Empty if a turn has one call.
    pub(super) next: &'static [&'static str],
    /// Texts behind the last call.
    pub(super) end: &'static [&'static str],
    /// Marks that no text has. The first may stand before a mark that is `first_only`.
    pub(super) marks: &'static [&'static str],
}

const NAME: &str = "{\"name\": \"";
const NAME_BELOW: &str = "\n{\"name\": \"";
const ARGUMENTS: &str = "\", \"arguments\": ";

/// Hermes, Qwen, Granite 4: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. Also the
/// format for a model whose template knows no tools.
const HERMES: CallFormat = CallFormat {
    known_by: &["<tool_call>", "</tool_call>", "arguments"],
    mark: "<tool_call>",
    first_only: false,
    open: &[NAME_BELOW],
    arguments: ARGUMENTS,
    close: &["}", "\n</tool_call>"],
    next: &["\n<tool_call>", NAME_BELOW],
    end: &[],
    marks: &["<tool_call>", "</tool_call>"],
};

/// Families, the more special ones first.
const FAMILIES: &[CallFormat] = &[
    // Mistral since 2025-06: `[TOOL_CALLS]f[ARGS]{...}`.
    CallFormat {
        known_by: &["[TOOL_CALLS]", "[ARGS]"],
        mark: "[TOOL_CALLS]",
        first_only: false,
        open: &[],
        arguments: "[ARGS]",
        close: &[],
        next: &["[TOOL_CALLS]"],
        end: &[],
        marks: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    },
    // Mistral: `[TOOL_CALLS][{...}, {...}]`.
    CallFormat {
        known_by: &["[TOOL_CALLS]"],
        mark: "[TOOL_CALLS]",
        first_only: false,
        open: &["[", NAME],
        arguments: ARGUMENTS,
        close: &["}"],
        next: &[",", " {\"name\": \""],
        end: &["]"],
        marks: &["[TOOL_CALLS]"],
    },
    // Granite 3.
    CallFormat {
        known_by: &["<|tool_call|>"],
        mark: "<|tool_call|>",
        first_only: false,
        open: &["[", NAME],
        arguments: ARGUMENTS,
        close: &["}"],
        next: &[",", " {\"name\": \""],
        end: &["]"],
        marks: &["<|tool_call|>"],
    },
    // Cohere's Command R7B.
    CallFormat {
        known_by: &["<|START_ACTION|>", "<|END_ACTION|>"],
        mark: "<|START_ACTION|>",
        first_only: false,
        open: &["[", "{\"tool_call_id\": \"0\", \"tool_name\": \""],
        arguments: "\", \"parameters\": ",
        close: &["}"],
        next: &[],
        end: &["]", "<|END_ACTION|>"],
        marks: &["<|START_ACTION|>", "<|END_ACTION|>"],
    },
    // gpt-oss: a call is a message of its own, to a recipient.
    CallFormat {
        known_by: &["<|channel|>analysis<|message|>"],
        mark: "<|channel|>commentary to=functions.",
        first_only: true,
        open: &[],
        arguments: " <|constrain|>json<|message|>",
        close: &[],
        next: &[],
        end: &[],
        marks: &[
            "<|start|>assistant",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
        ],
    },
    // Llama 3: the whole answer is `{"name": ..., "parameters": ...}`.
    CallFormat {
        known_by: &["\"parameters\": dictionary of argument name and its value"],
        mark: NAME,
        first_only: true,
        open: &[],
        arguments: "\", \"parameters\": ",
        close: &["}"],
        next: &[],
        end: &[],
        marks: &["<|python_tag|>"],
    },
];

/// Texts in the `<tool_call>` of families whose arguments are not JSON.
const NOT_JSON: &[&str] = &["<arg_key>", "<function=", "<parameter="];

/// Beginning and end of reasoning, behind the text by which a template is known.
const THOUGHTS: &[(&str, (&str, &str))] = &[
    (ANALYSIS, (ANALYSIS, "<|end|>")),
    ("</think>", ("<think>", "</think>")),
    ("[/THINK]", ("[THINK]", "[/THINK]")),
];

const ANALYSIS: &str = "<|channel|>analysis<|message|>";

/// Header of the text in gpt-oss.
const FINAL: &str = "<|channel|>final<|message|>";

/// All marks that may be control tokens. In a turn with tools or reasoning, such a token is text.
pub(crate) const MARKS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_call|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
];

/// Format of tool calls and reasoning in a turn of the model.
#[derive(Debug, Clone, Copy)]
pub struct TurnFormat {
    pub(super) calls: &'static CallFormat,
    /// True if the template describes the tools. Otherwise a system text does.
    pub(crate) describes: bool,
    /// True if the template writes earlier calls and their results. Otherwise they are texts.
    pub(crate) writes: bool,
    /// Beginning and end of reasoning, if the model reasons.
    pub(super) thought: Option<(&'static str, &'static str)>,
    /// Header of the text. The first of the calls' marks may stand before it.
    pub(super) header: Option<&'static str>,
}

impl TurnFormat {
    /// Format of the model with this chat template.
    pub fn of(template: &str) -> Self {
        let has = |text: &&str| template.contains(*text);
        let fits = |family: &&CallFormat| family.known_by.iter().all(&has);
        let hermes = std::iter::once(&HERMES).filter(|_| !NOT_JSON.iter().any(&has));
        let known = FAMILIES.iter().chain(hermes).find(fits);
        let mut thoughts = THOUGHTS.iter().copied();
        Self {
            calls: known.unwrap_or(&HERMES),
            describes: known.is_some() && has(&"tools"),
            writes: known.is_some() && has(&"tool_calls"),
            thought: thoughts
                .find(|(known, _)| template.contains(*known))
                .map(|(_, marks)| marks),
            header: Some(FINAL).filter(|_| has(&ANALYSIS)),
        }
    }

    /// A call, as the family writes it.
    pub(crate) fn written(&self, name: &str, arguments: &str) -> String {
        let calls = self.calls;
        let before = std::iter::once(calls.mark).chain(calls.open.iter().copied());
        let called = [name, calls.arguments, arguments];
        let behind = calls.close.iter().chain(calls.end).copied();
        before.chain(called).chain(behind).collect()
    }

    /// Text that ends reasoning, and that stands between it and the answer.
    pub fn end_of_thought(&self) -> Option<String> {
        let (_, end) = self.thought?;
        Some(match (self.header, self.calls.marks.first()) {
            (Some(header), Some(before)) => format!("{end}{before}{header}"),
            _ => format!("{end}\n\n"),
        })
    }

    /// Whether a prompt ends within reasoning.
    pub fn is_thinking(&self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        self.thought
            .is_some_and(|(begin, _)| prompt.ends_with(begin))
    }

    /// Whether the model reasons before it answers.
    pub fn thinks(&self) -> bool {
        self.thought.is_some()
    }

    /// Marks of a turn that are text although they may be control tokens. `calls`: it may have
    /// calls.
    pub fn marks(&self, calls: bool) -> Vec<&'static str> {
        let thought = self.thought.iter().flat_map(|(begin, end)| [*begin, *end]);
        let shown = calls || self.header.is_some();
        let marks = self.calls.marks.iter().copied().filter(|_| shown);
        thought.chain(marks).collect()
    }
}
