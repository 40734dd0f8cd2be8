//! Which variables of a rendering a template looks at.

use hashbrown::HashSet;

/// The names in a template's code.
#[derive(Debug, Default)]
pub(super) struct Variables {
    /// Looked at, wherever their values come from.
    read: HashSet<String>,
    /// Given a value by the template itself: loop variables, parameters of macros, what is set.
    own: HashSet<String>,
}

/// Words of the language, which name no variable.
const WORDS: [&str; 12] =
    ["and", "else", "false", "False", "if", "in", "none", "None", "not", "or", "true", "True"];

impl Variables {
    /// Of a template's source. minijinja's own analysis does not see the second `x` of `{% set x = x or y %}`.
    pub(super) fn of(source: &str) -> Self {
        let mut this = Self::default();
        let mut rest = source;
        while let Some(at) = rest.find('{') {
            let tag = rest.split_at(at).1;
            let end = match tag.get(..2) {
                Some("{{") => "}}",
                Some("{%") => "%}",
                Some("{#") => {
                    rest = tag.split_once("#}").map_or("", |(_, after)| after);
                    continue;
                }
                _ => {
                    rest = tag.split_at(1).1;
                    continue;
                }
            };
            rest = this.tag(tag.split_at(2).1, end);
        }
        this
    }

    /// Whether the template looks at `name`.
    pub(super) fn reads(&self, name: &str) -> bool {
        self.read.contains(name)
    }

    /// Those that it looks at and does not make itself, in alphabetical order.
    pub(super) fn outer(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.read.difference(&self.own).map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Reads a tag up to `end`; returns what is behind it.
    fn tag<'a>(&mut self, code: &'a str, end: &str) -> &'a str {
        let mut rest = code.trim_start_matches(['-', '+']);
        // The statement's word, once it has been read.
        let mut statement = (end == "}}").then_some("");
        // What is before a name: an attribute has a point, a filter a bar, a test `is`.
        let mut before = "";
        let (mut targets, mut braces) = (false, 0_usize);
        while let Some(c) = rest.chars().next() {
            if braces == 0 && rest.starts_with(end) {
                return rest.split_at(end.len()).1;
            }
            if matches!(c, '"' | '\'') {
                (before, rest) = ("", behind_text(rest, c));
                continue;
            }
            if !is_name(c) {
                let (mark, after) = rest.split_at(c.len_utf8());
                before = if c.is_whitespace() { before } else { mark };
                targets &= c != '=';
                match c {
                    '{' => braces += 1,
                    '}' => braces = braces.saturating_sub(1),
                    _ => {}
                }
                rest = after;
                continue;
            }
            let (name, after) = rest.split_at(rest.find(|c| !is_name(c)).unwrap_or(rest.len()));
            rest = after;
            let Some(statement) = statement else {
                statement = Some(name);
                targets = matches!(name, "for" | "macro" | "set" | "with");
                continue;
            };
            targets &= !(statement == "for" && name == "in");
            match (before, name) {
                ("is", "not") => continue,
                ("." | "|" | "is", _) => {}
                _ if c.is_ascii_digit() || WORDS.contains(&name) || name == "is" => {}
                _ if targets || statement == "macro" => drop(self.own.insert(name.to_owned())),
                // The name of an argument.
                _ if names_argument(after) => {}
                _ => drop(self.read.insert(name.to_owned())),
            }
            before = if name == "is" { "is" } else { "" };
        }
        ""
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Whether a name before `after` is given a value there.
fn names_argument(after: &str) -> bool {
    after.trim_start().strip_prefix('=').is_some_and(|after| !after.starts_with('='))
}

/// What is behind the text that `code` begins with, in quotes.
fn behind_text(code: &str, quote: char) -> &str {
    let mut escaped = false;
    for (at, c) in code.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return code.split_at(at + 1).1,
            _ => {}
        }
    }
    ""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_told_from_everything_else() {
        let source = r#"a {# b #} {%- set tools = tools or none -%} {% for m in messages if m.role != 'x' %}
            {{- m.tools ~ m['documents'] ~ "enable_thinking }}" ~ 'it\'s kept' | tojson(indent=width) -}}
            {% if strict is not defined and depth is divisibleby other %}{% endif %}{% endfor %} { not_code }
            {% macro show(item, level=1) %}{{ item.x }}{% endmacro %}{% set ns.last = show(first, level=2) %}
            {% with y = z %}{{ y == 3 }}{% endwith %}{{ {'a': {'b': 1}} | tojson ~ behind }}"#;
        let found = Variables::of(source);
        for name in
            ["tools", "messages", "width", "strict", "depth", "other", "first", "z", "item", "y", "behind"]
        {
            assert!(found.reads(name), "{name}");
        }
        for name in [
            "b",
            "documents",
            "enable_thinking",
            "kept",
            "tojson",
            "indent",
            "defined",
            "divisibleby",
            "role",
            "level",
            "not_code",
            "set",
            "endif",
            "in",
            "is",
            "not",
            "none",
            "last",
            "3",
        ] {
            assert!(!found.reads(name), "{name}");
        }
        assert_eq!(found.outer(), ["behind", "depth", "first", "messages", "other", "strict", "width", "z"]);
    }

    #[test]
    fn a_template_that_breaks_off_is_read_to_its_end() {
        for source in ["{{ a", "{% set a", "{{ 'a", "{# a", "{", "{% for", "{{ a.", "{{é}}"] {
            let _ = Variables::of(source);
        }
        assert!(Variables::of("{{ a").reads("a"));
    }
}
