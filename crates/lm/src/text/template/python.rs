//! Python's string methods, where those of minijinja's own compatibility layer are missing or differ.

use minijinja::value::{Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Called for methods that a value does not have itself.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => match string_method(text, name, args) {
            Some(result) => result,
            None => {
                if name == "format" {
                    pay_for_format(state, text, args)?;
                }
                pycompat::unknown_method_callback(state, value, name, args)
            }
        },
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// `str.format` of the compatibility layer makes texts of any width for nothing.
fn pay_for_format(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<(), Error> {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widths = numbers.map(|digits| digits.parse().unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
    let fields = text.matches('{').count() as u64;
    let arguments: usize = args.iter().map(|arg| arg.as_str().map_or(64, str::len)).sum();
    pay(state, widths.saturating_add(fields.saturating_mul(arguments as u64)))
}

/// Charges for making a text of so many bytes, at minijinja's price.
pub(super) fn pay(state: &State<'_, '_>, bytes: u64) -> Result<(), Error> {
    const WIDTH_MAX: u64 = 1 << 24;
    if bytes > WIDTH_MAX {
        return Err(Error::new(ErrorKind::OutOfFuel, format!("a text of {bytes} bytes")));
    }
    state.consume_fuel(bytes / 64)
}

fn string_method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match name {
        "strip" => strip(text, args, true, true),
        "lstrip" => strip(text, args, true, false),
        "rstrip" => strip(text, args, false, true),
        "splitlines" => split_lines(text, args),
        "split" if args.is_empty() => {
            Ok(text.split(is_space).filter(|part| !part.is_empty()).map(Value::from).collect())
        }
        "rsplit" => rsplit(text, args),
        "partition" => partition(text, args, false),
        "rpartition" => partition(text, args, true),
        "removeprefix" => from_args(args).map(|(p,): (&str,)| text.strip_prefix(p).unwrap_or(text).into()),
        "removesuffix" => from_args(args).map(|(s,): (&str,)| text.strip_suffix(s).unwrap_or(text).into()),
        "index" => index(text, args),
        "title" => Ok(title(text).into()),
        "center" => center(text, args),
        "swapcase" => Ok(text.chars().map(swap_case).collect::<String>().into()),
        "isdecimal" => Ok((!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())).into()),
        "zfill" => pad(text, args, '0', false),
        "ljust" => pad(text, args, ' ', true),
        "rjust" => pad(text, args, ' ', false),
        _ => return None,
    })
}

/// White space in Python: that of Unicode and four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

pub(super) fn trim(text: &str) -> &str {
    text.trim_matches(is_space)
}

fn strip(text: &str, args: &[Value], start: bool, end: bool) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let unwanted = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(unwanted) } else { text };
    Ok(if end { text.trim_end_matches(unwanted) } else { text }.into())
}

fn split_lines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep,): (Option<bool>,) = from_args(args)?;
    let keep = keep == Some(true);
    let line =
        |(line, end): (&str, &str)| Value::from(if keep { format!("{line}{end}") } else { line.to_owned() });
    Ok(lines(text).into_iter().map(line).collect())
}

/// Lines with their ends; an end at the end of the text begins no further line.
pub(super) fn lines(text: &str) -> Vec<(&str, &str)> {
    let ends = |c| {
        matches!(
            c,
            '\n' | '\r' | '\u{B}' | '\u{C}' | '\u{1C}'..='\u{1E}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(ends) {
        let (line, tail) = rest.split_at(at);
        let length = if tail.starts_with("\r\n") { 2 } else { tail.chars().next().map_or(1, char::len_utf8) };
        let (end, after) = tail.split_at_checked(length).unwrap_or((tail, ""));
        lines.push((line, end));
        rest = after;
    }
    if !rest.is_empty() {
        lines.push((rest, ""));
    }
    lines
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
    let most = usize::try_from(most.unwrap_or(-1)).map_or(usize::MAX, |n| n.saturating_add(1));
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) => text.rsplitn(most, separator).collect(),
        None => {
            let words = text.split(is_space).filter(|part| !part.is_empty());
            if most != usize::MAX {
                let why = "rsplit with a count needs a separator";
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
            words.rev().collect()
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

fn partition(text: &str, args: &[Value], from_end: bool) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    let halves = if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match halves {
        Some((before, after)) => [before, separator, after],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::new(parts.iter().map(|&part| part.into()).collect())))
}

fn index(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (part,): (&str,) = from_args(args)?;
    let found = text.split_once(part).map(|(before, _)| before.chars().count());
    found.map(Value::from).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))
}

/// The width that a text is padded to, and with what.
fn width_and_fill(args: &[Value]) -> Result<(usize, Option<char>), Error> {
    const WIDTH_MAX: usize = 1 << 16;
    let (width, fill): (usize, Option<char>) = from_args(args)?;
    if width > WIDTH_MAX {
        let why = format!("width {width} is more than {WIDTH_MAX}");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    Ok((width, fill))
}

fn pad(text: &str, args: &[Value], default: char, after: bool) -> Result<Value, Error> {
    let (width, fill) = width_and_fill(args)?;
    let count = width.saturating_sub(text.chars().count());
    let padding: String = std::iter::repeat_n(fill.unwrap_or(default), count).collect();
    Ok(if after { format!("{text}{padding}") } else { format!("{padding}{text}") }.into())
}

fn center(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill) = width_and_fill(args)?;
    let count = width.saturating_sub(text.chars().count());
    // The odd character goes to the left where the width is odd.
    let left = count / 2 + (count & width & 1);
    let padding = |n| std::iter::repeat_n(fill.unwrap_or(' '), n).collect::<String>();
    Ok(format!("{}{text}{}", padding(left), padding(count - left)).into())
}

/// Every letter after something else than a letter is upper case, the others lower case.
fn title(text: &str) -> String {
    let mut out = String::new();
    let mut after_letter = false;
    for c in text.chars() {
        if after_letter {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        after_letter = c.is_alphabetic();
    }
    out
}

fn swap_case(c: char) -> String {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}
