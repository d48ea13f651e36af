//! Aligned columns as text: numbers to the right, and the last column, which is never cut, to the left.

use crate::failure::Failure;
use crate::printer::Printer;

/// What stands between two columns.
const GAP: &str = "  ";

/// A table under construction: one heading, then rows of as many cells.
pub(crate) struct Table {
    heading: Vec<String>,
    rows: Vec<Row>,
}

struct Row {
    cells: Vec<String>,
    is_marked: bool,
}

impl Table {
    pub(crate) fn new(heading: &[&str]) -> Table {
        Table { heading: heading.iter().map(|&cell| cell.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row; a marked one is the one to compare the others with.
    pub(crate) fn row(&mut self, cells: Vec<String>, is_marked: bool) {
        debug_assert_eq!(cells.len(), self.heading.len(), "a row has a cell for each column");
        self.rows.push(Row { cells, is_marked });
    }

    /// Leaves a column out.
    pub(crate) fn drop_column(&mut self, heading: &str) {
        let Some(column) = self.heading.iter().position(|cell| cell == heading) else { return };
        self.heading.remove(column);
        for row in &mut self.rows {
            row.cells.remove(column);
        }
    }

    /// Prints the table, indented by two spaces.
    pub(crate) fn print(&self, printer: &mut Printer) -> Result<(), Failure> {
        let style = printer.style();
        let widths = self.widths();
        writeln!(printer, "{}", style.faint(line(&self.heading, &widths)))?;
        for row in &self.rows {
            let text = line(&row.cells, &widths);
            if row.is_marked {
                writeln!(printer, "{}", style.strong(text))?;
            } else {
                writeln!(printer, "{text}")?;
            }
        }
        Ok(())
    }

    /// Each column as wide as its widest cell.
    fn widths(&self) -> Vec<usize> {
        let mut widths = vec![0; self.heading.len()];
        for cells in self.rows.iter().map(|row| &row.cells).chain([&self.heading]) {
            for (width, cell) in widths.iter_mut().zip(cells) {
                *width = cell.chars().count().max(*width);
            }
        }
        widths
    }
}

fn line(cells: &[String], widths: &[usize]) -> String {
    let mut line = String::new();
    for (column, (cell, &width)) in cells.iter().zip(widths).enumerate() {
        line.push_str(GAP);
        if column + 1 < cells.len() {
            line.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.chars().count())));
        }
        line.push_str(cell);
    }
    line.truncate(line.trim_end().len());
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(table: &Table) -> Vec<String> {
        let widths = table.widths();
        let rows = table.rows.iter().map(|row| &row.cells);
        [&table.heading].into_iter().chain(rows).map(|cells| line(cells, &widths)).collect()
    }

    #[test]
    fn numbers_are_aligned_and_the_last_column_is_whole() {
        let mut table = Table::new(&["peak", "ooms", "settings"]);
        table.row(vec!["9.0 GiB".into(), "0".into(), "recorded".into()], true);
        table.row(vec!["14.5 GiB".into(), "12".into(), String::new()], false);
        assert_eq!(
            lines(&table),
            ["      peak  ooms  settings", "   9.0 GiB     0  recorded", "  14.5 GiB    12"]
        );
        table.drop_column("ooms");
        assert_eq!(lines(&table), ["      peak  settings", "   9.0 GiB  recorded", "  14.5 GiB"]);
    }
}
