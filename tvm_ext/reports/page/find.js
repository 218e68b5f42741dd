{
  const words = document.querySelector("#find-words"), path = document.querySelector("#find-path");
  const doubt = document.querySelector("#find-doubt"), count = document.querySelector("#find-count");
  const find = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const asked = wanted.length > 0 || path.value !== "" || doubt.checked;
    const fits = (item) =>
      wanted.every((word) => item.dataset.words.includes(word)) &&
      (path.value === "" || item.dataset.path === path.value) && (!doubt.checked || "doubt" in item.dataset);
    for (const item of document.querySelectorAll("[data-words]")) {
      item.hidden = !fits(item);
      item.classList.toggle("found", asked);
    }
    const rows = [...document.querySelectorAll("#operators tbody tr")];
    count.textContent = asked ? rows.filter((row) => !row.hidden).length + " of " + rows.length : "";
  };
  for (const field of [words, path, doubt]) field.addEventListener("input", find);
  document.querySelector("form.find").addEventListener("submit", (event) => event.preventDefault());
}
