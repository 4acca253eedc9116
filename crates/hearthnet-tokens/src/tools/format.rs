//! Families, by the texts with which they mark reasoning and calls.

use super::arguments::{Arguments, Listed};

/// How a family writes calls. Between two texts of a list may be white space.
///
/// ```text
/// mark open NAME behind_name arguments close  next NAME behind_name arguments close  end
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
    /// Text between the name and the arguments.
    pub(super) behind_name: &'static str,
    pub(super) arguments: Arguments,
    /// Texts behind the arguments.
    pub(super) close: &'static [&'static str],
    /// Texts between a call and the name of the next one. Empty if a turn has one call.
    pub(super) next: &'static [&'static str],
    /// Texts behind the last call.
    pub(super) end: &'static [&'static str],
    /// Marks that no text has. The first may stand before a mark that is `first_only`.
    pub(super) marks: &'static [&'static str],
}

/// Base of all families: one call of JSON arguments without texts around it.
const BASE: CallFormat = CallFormat {
    known_by: &[],
    mark: "",
    first_only: false,
    open: &[],
    behind_name: "",
    arguments: Arguments::Json,
    close: &[],
    next: &[],
    end: &[],
    marks: &[],
};

/// A list of `{"name": ..., "arguments": ...}`.
const JSON_LIST: CallFormat = CallFormat {
    open: &["[", NAME],
    behind_name: ARGUMENTS,
    close: &["}"],
    next: &[",", " {\"name\": \""],
    ..BASE
};

const NAME: &str = "{\"name\": \"";
const NAME_BELOW: &str = "\n{\"name\": \"";
const ARGUMENTS: &str = "\", \"arguments\": ";

/// Hermes, Qwen, Granite 4: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. Also the
/// format for a model whose template knows no tools.
const HERMES: CallFormat = CallFormat {
    known_by: &["<tool_call>", "</tool_call>", "arguments"],
    mark: "<tool_call>",
    open: &[NAME_BELOW],
    behind_name: ARGUMENTS,
    close: &["}", "\n</tool_call>"],
    next: &["\n<tool_call>", NAME_BELOW],
    marks: &["<tool_call>", "</tool_call>"],
    ..BASE
};

/// Families, the more special ones first.
const FAMILIES: &[CallFormat] = &[
    // Gemma 4: `<|tool_call>call:f{town:<|"|>Oslo<|"|>}<tool_call|>`.
    CallFormat {
        known_by: &["<|tool_call>call:"],
        mark: "<|tool_call>",
        open: &["call:"],
        arguments: Arguments::Gemma,
        close: &["<tool_call|>"],
        next: &["<|tool_call>", "call:"],
        marks: &[
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            "<|\"|>",
            "<|channel>",
            "<channel|>",
        ],
        ..BASE
    },
    // Seed-OSS: `<seed:tool_call><function=f><parameter=town>Oslo</parameter>...`.
    CallFormat {
        known_by: &["<seed:tool_call>", "<function=", "<parameter="],
        mark: "<seed:tool_call>",
        open: &["\n<function="],
        behind_name: ">",
        arguments: Arguments::Listed(Listed {
            name: "<parameter=",
            value: &[">"],
            behind: "</parameter>",
            between: "",
            end: "</function>",
            raw: true,
        }),
        close: &["\n</seed:tool_call>"],
        next: &["\n<seed:tool_call>", "\n<function="],
        marks: &["<seed:tool_call>", "</seed:tool_call>"],
        ..BASE
    },
    // Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5: as Seed-OSS, but a value has its own lines.
    CallFormat {
        known_by: &["<tool_call>", "<function=", "<parameter="],
        mark: "<tool_call>",
        open: &["\n<function="],
        behind_name: ">",
        arguments: Arguments::Listed(Listed {
            name: "<parameter=",
            value: &[">\n"],
            behind: "\n</parameter>",
            between: "",
            end: "</function>",
            raw: true,
        }),
        close: &["\n</tool_call>"],
        next: &["\n<tool_call>", "\n<function="],
        marks: &["<tool_call>", "</tool_call>"],
        ..BASE
    },
    // GLM 4.5 and later, Ling 3, Laguna: `<tool_call>f<arg_key>town</arg_key><arg_value>Oslo...`.
    CallFormat {
        known_by: &["<tool_call>", "<arg_key>", "<arg_value>"],
        mark: "<tool_call>",
        arguments: Arguments::Listed(Listed {
            name: "<arg_key>",
            value: &["</arg_key>", "<arg_value>"],
            behind: "</arg_value>",
            between: "",
            end: "</tool_call>",
            raw: true,
        }),
        next: &["<tool_call>"],
        marks: &[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        ..BASE
    },
    // MiniMax M2: `<minimax:tool_call><invoke name="f"><parameter name="town">Oslo...`.
    CallFormat {
        known_by: &["<minimax:tool_call>", "<invoke name=", "<parameter name="],
        mark: "<minimax:tool_call>",
        open: &["\n<invoke name=\""],
        behind_name: "\">",
        arguments: Arguments::Listed(Listed {
            name: "<parameter name=\"",
            value: &["\">"],
            behind: "</parameter>",
            between: "",
            end: "</invoke>",
            raw: true,
        }),
        next: &["\n<invoke name=\""],
        end: &["\n</minimax:tool_call>"],
        marks: &["<minimax:tool_call>", "</minimax:tool_call>"],
        ..BASE
    },
    // LFM2 and LFM2.5: `<|tool_call_start|>[f(town='Oslo', days=2)]<|tool_call_end|>`. Most of
    // their templates show the tools, and no call.
    CallFormat {
        known_by: &["List of tools: "],
        mark: "<|tool_call_start|>",
        open: &["["],
        behind_name: "(",
        arguments: Arguments::Listed(Listed {
            name: "",
            value: &["="],
            behind: "",
            between: ", ",
            end: ")",
            raw: false,
        }),
        next: &[", "],
        end: &["]", "<|tool_call_end|>"],
        marks: &["<|tool_call_start|>", "<|tool_call_end|>"],
        ..BASE
    },
    // Nemotron Nano 2.
    CallFormat {
        known_by: &["<TOOLCALL>[", "]</TOOLCALL>"],
        mark: "<TOOLCALL>",
        end: &["]", "</TOOLCALL>"],
        marks: &["<TOOLCALL>", "</TOOLCALL>"],
        ..JSON_LIST
    },
    // Apriel.
    CallFormat {
        known_by: &["<tool_calls>[", "]</tool_calls>"],
        mark: "<tool_calls>",
        end: &["]", "</tool_calls>"],
        marks: &["<tool_calls>", "</tool_calls>"],
        ..JSON_LIST
    },
    // Apertus: `<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>`.
    CallFormat {
        known_by: &["<|tools_prefix|>", "<|tools_suffix|>"],
        mark: "<|tools_prefix|>",
        open: &["[", "{\""],
        behind_name: "\": ",
        close: &["}"],
        next: &[",", " {\""],
        end: &["]", "<|tools_suffix|>"],
        marks: &["<|tools_prefix|>", "<|tools_suffix|>"],
        ..BASE
    },
    // Mistral since 2025-06: `[TOOL_CALLS]f[ARGS]{...}`.
    CallFormat {
        known_by: &["[TOOL_CALLS]", "[ARGS]"],
        mark: "[TOOL_CALLS]",
        behind_name: "[ARGS]",
        next: &["[TOOL_CALLS]"],
        marks: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        ..BASE
    },
    // Mistral: `[TOOL_CALLS][{...}, {...}]`.
    CallFormat {
        known_by: &["[TOOL_CALLS]"],
        mark: "[TOOL_CALLS]",
        end: &["]"],
        marks: &["[TOOL_CALLS]"],
        ..JSON_LIST
    },
    // Granite 3.
    CallFormat {
        known_by: &["<|tool_call|>"],
        mark: "<|tool_call|>",
        end: &["]"],
        marks: &["<|tool_call|>"],
        ..JSON_LIST
    },
    // Cohere's Command R7B.
    CallFormat {
        known_by: &["<|START_ACTION|>", "<|END_ACTION|>"],
        mark: "<|START_ACTION|>",
        open: &["[", "{\"tool_call_id\": \"0\", \"tool_name\": \""],
        behind_name: "\", \"parameters\": ",
        close: &["}"],
        end: &["]", "<|END_ACTION|>"],
        marks: &["<|START_ACTION|>", "<|END_ACTION|>"],
        ..BASE
    },
    // gpt-oss: a call is a message of its own, to a recipient.
    CallFormat {
        known_by: &["<|channel|>analysis<|message|>"],
        mark: "<|channel|>commentary to=functions.",
        first_only: true,
        behind_name: " <|constrain|>json<|message|>",
        marks: &[
            "<|start|>assistant",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
        ],
        ..BASE
    },
    // Llama 3: the whole answer is `{"name": ..., "parameters": ...}`.
    CallFormat {
        known_by: &["\"parameters\": dictionary of argument name and its value"],
        mark: NAME,
        first_only: true,
        behind_name: "\", \"parameters\": ",
        close: &["}"],
        marks: &["<|python_tag|>"],
        ..BASE
    },
];

/// Texts in the `<tool_call>` of families whose arguments are not JSON, and in no known form.
const NOT_JSON: &[&str] = &["<arg_key>", "<function=", "<parameter=", "<invoke name="];

/// Beginning and end of reasoning, behind the text by which a template is known.
const THOUGHTS: &[(&str, (&str, &str))] = &[
    (ANALYSIS, (ANALYSIS, "<|end|>")),
    ("<|channel>thought", ("<|channel>thought\n", "<channel|>")),
    ("</seed:think>", ("<seed:think>", "</seed:think>")),
    ("</mm:think>", ("<mm:think>", "</mm:think>")),
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
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<tool_calls>",
    "</tool_calls>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|channel>",
    "<channel|>",
    "<seed:think>",
    "</seed:think>",
    "<mm:think>",
    "</mm:think>",
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
        let arguments = calls.arguments.written(arguments);
        let called = [name, calls.behind_name, &arguments];
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
            .is_some_and(|(begin, _)| prompt.ends_with(begin.trim_end()))
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
